import asyncio
import contextlib
import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp.types import CallToolResult, TextContent
from support.patience import PATIENCE

from agentrl.errors import ConfigError, ToolError
from agentrl.runtime.processes.wall import remove_folder
from agentrl.tools import ToolsConfig, connect_tools, probe
from agentrl.tools.servers.result_content import result_text

TOOL_SERVER = Path(__file__).parents[2] / "support/tool_server.py"
PRYING = TOOL_SERVER.with_name("prying_server.py")
NOTES = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("notes")
@server.tool()
def note() -> None:
    open("notes.txt", "w")
server.run("stdio")
"""
ConfigFor = Callable[..., ToolsConfig]


async def test_tools_are_listed_and_called(server_url: str, config_for: ConfigFor) -> None:
    async with connect_tools(config_for(server_url)) as box:
        add = next(spec for spec in box.specs if spec.name == "add")
        function = add.openai()["function"]
        assert function["description"] == "Add two integers."
        assert set(function["parameters"]["properties"]) == {"a", "b"}
        result = await box.call("add", {"a": 20, "b": 1}, call_id="call_0_0")
    assert (result.call_id, result.name, result.content) == ("call_0_0", "add", "21")
    assert not result.is_error
    assert result.seconds > 0


async def test_tools_look_alike_in_all_generations_of_the_protocol(
    server_url: str, config_for: ConfigFor
) -> None:
    shown = []
    for per_rollout in (False, True):  # the older protocol keeps state in the session
        servers = {"s": {"url": server_url, "per_rollout": per_rollout}}
        async with connect_tools(config_for(servers)) as box:
            shown.append(json.dumps([spec.openai() for spec in box.specs]))
    assert shown[0] == shown[1]


async def test_many_rollouts_share_one_connection(server_url: str, config_for: ConfigFor) -> None:
    async with connect_tools(config_for(server_url)) as box:
        calls = [box.call("add", {"a": i, "b": i}) for i in range(100)]
        results = await asyncio.gather(*calls)
    assert [int(result.content) for result in results] == [2 * i for i in range(100)]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("fail", {"reason": "no such item: sofa"}, "no such item: sofa"),
        ("crash", {}, "Error executing tool crash"),
        ("add", {"a": "x"}, "Input should be a valid integer"),
        ("add", {"a": "\ud83d"}, "the arguments are not JSON: 'utf-8' codec can't encode"),
        ("add", {"a": b"1"}, "the arguments are not JSON: Object of type bytes"),
        ("addd", {"a": 1, "b": 2}, "there is no tool named 'addd'. Did you mean add? Tools: add,"),
    ],
)
async def test_errors_of_the_models_making_are_observations(
    server_url: str, config_for: ConfigFor, name: str, arguments: dict[str, Any], said: str
) -> None:
    async with connect_tools(config_for(server_url)) as box:
        result = await box.call(name, arguments)
    assert result.is_error
    assert said in result.content


@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_a_call_that_takes_too_long_is_an_observation(
    server_url: str, config_for: ConfigFor, stdio_server: dict[str, object], transport: str
) -> None:
    servers = server_url if transport == "http" else {"local": stdio_server}
    async with connect_tools(config_for(servers, call_timeout_seconds=1.5)) as box:
        slow, quick = await asyncio.gather(
            box.call("slow", {"seconds": 30}), box.call("add", {"a": 1, "b": 1})
        )
        again = await box.call("add", {"a": 1, "b": 2})
    assert (slow.is_error, slow.content) == (True, "Error: no result within 1.5 s")
    assert (quick.content, again.content) == ("2", "3")


async def test_every_kind_of_content_becomes_readable_text(
    server_url: str, config_for: ConfigFor
) -> None:
    async with connect_tools(config_for(server_url)) as box:
        mixed = await box.call("mixed", {})
        structured = await box.call("structured", {})
    assert mixed.content.splitlines() == [
        "first",
        "[image image/png, 4 bytes, not shown]",
        "[audio audio/wav, 5 bytes, not shown]",
        "[resource page: https://example.org/page]",
        "inside",
        "[resource file:///b, application/pdf, 3 bytes, not shown]",
    ]
    assert structured.content == '{"price": 21, "name": "Lämpchen"}'


@pytest.mark.parametrize(
    ("texts", "structured", "shown"),
    [
        (["5"], {"result": 5}, "5"),
        (["5"], {"result": 5, "unit": "kg"}, '5\n{"result": 5, "unit": "kg"}'),
        (["a", "b"], {"result": ["a", "b"]}, "a\nb"),
        (['{"result": 5}'], {"result": 5}, '{"result": 5}'),
    ],
)
def test_structured_content_is_shown_unless_the_text_has_all_of_it(
    texts: list[str], structured: dict[str, object], shown: str
) -> None:
    blocks = [TextContent(type="text", text=text) for text in texts]
    result = CallToolResult(content=[*blocks], structured_content=structured)
    assert result_text(result, 100) == shown


async def test_long_results_are_cut_in_the_middle(server_url: str, config_for: ConfigFor) -> None:
    async with connect_tools(config_for(server_url, max_result_chars=10)) as box:
        result = await box.call("long", {"size": 99})
    assert result.content == "aaaaa\n[... 90 characters left out ...]\naaaaz"


async def test_stdio_servers_are_started_spoken_to_and_ended(
    config_for: ConfigFor, stdio_server: dict[str, object]
) -> None:
    servers = {"local": {**stdio_server, "env": {"SHOP": "open"}}}
    async with connect_tools(config_for(servers)) as box:
        results = await asyncio.gather(
            box.call("add", {"a": 1, "b": 2}), box.call("environment", {"name": "SHOP"})
        )
    assert [result.content for result in results] == ["3", "open"]


async def test_a_result_that_breaks_the_tools_own_promise_is_an_observation(
    config_for: ConfigFor, stdio_server: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    script, _, count_file = stdio_server["args"]
    liar = {**stdio_server, "args": [script, "liar", count_file]}
    async with connect_tools(config_for({"liar": liar})) as box:
        result = await box.call("lie", {})
    assert not result.is_error
    assert result.content == (
        "[structured content that does not fit the tool's output schema: 'three' is not of type "
        "'integer']\n" + '{"n": "three"}'
    )
    assert "a result of lie does not fit its output schema" in caplog.text


async def test_sse_servers_are_spoken_to(
    start_server: Callable[..., Any], config_for: ConfigFor
) -> None:
    url = start_server("sse").url.replace("/mcp", "/sse")
    config = config_for({"s": {"url": url, "type": "sse"}}, auth_token="s3cret")
    async with connect_tools(config) as box:
        assert (await box.call("add", {"a": 1, "b": 2})).content == "3"
        assert (await box.call("token", {})).content == "Bearer s3cret"


async def test_clashing_names_are_qualified_and_reported(
    server_url: str,
    config_for: ConfigFor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = {"one": {"url": server_url}, "two": {"url": server_url}}
    async with connect_tools(config_for(servers, tool_names=["add", "two.fail"])) as box:
        assert [spec.name for spec in box.specs] == ["one.add", "two.add", "two.fail"]
        assert (await box.call("two.add", {"a": 1, "b": 2})).content == "3"
        assert (await box.call("add", {"a": 1, "b": 2})).is_error
        assert (await box.call("one.fail", {"reason": "x"})).content.startswith(
            "Error: there is no"
        )
    assert "renamed to server.tool: add, count" in caplog.text


async def test_server_names_filter_the_tools(server_url: str, config_for: ConfigFor) -> None:
    servers = {"one": {"url": server_url}, "off": {"url": "http://127.0.0.1:9/mcp"}}
    async with connect_tools(config_for(servers, server_names=["one"])) as box:
        assert {spec.server for spec in box.specs} == {"one"}
        assert "add" in [spec.name for spec in box.specs]


async def test_an_unknown_tool_filter_is_a_configuration_error(
    server_url: str, config_for: ConfigFor
) -> None:
    with pytest.raises(ConfigError, match="no MCP server offers the tool 'subtract'"):
        await probe(config_for(server_url, tool_names=["subtract"]))


@pytest.mark.parametrize(
    ("headers", "sent"), [({}, "Bearer s3cret"), ({"authorization": "Basic x"}, "Basic x")]
)
async def test_the_token_is_sent_and_not_shown(
    server_url: str, config_for: ConfigFor, headers: dict[str, str], sent: str
) -> None:
    config = config_for({"s": {"url": server_url, "headers": headers}}, auth_token="s3cret")
    async with connect_tools(config) as box:
        assert (await box.call("token", {})).content == sent
    assert "s3cret" not in repr(config)
    assert "s3cret" not in config.model_dump_json()


async def test_headers_of_a_server_are_sent_with_every_call(
    server_url: str, config_for: ConfigFor
) -> None:
    headers = {"MCP_SERVERS": "search,fetch", "X-Session": "7"}
    async with connect_tools(config_for({"s": {"url": server_url, "headers": headers}})) as box:
        sent = [(await box.call("header", {"name": name.lower()})).content for name in headers]
    assert sent == ["search,fetch", "7"]


async def test_probing_names_the_address_of_a_server_that_is_not_there(
    config_for: ConfigFor,
) -> None:
    with pytest.raises(ConfigError, match=r"at http://127\.0\.0\.1:9/mcp is unreachable"):
        await probe(config_for("http://user:pw@127.0.0.1:9/mcp?key=1"))
    with pytest.raises(ConfigError, match="at /no/such/command is unreachable"):
        await probe(config_for({"x": {"command": "/no/such/command"}}))
    unheard = r"at true is unreachable: Connection closed; the command exited without output \(exit 0\); a Python s"
    with pytest.raises(ConfigError, match=unheard):
        await probe(config_for({"x": {"command": "true"}}))


async def test_a_command_that_misses_a_variable_of_ours_is_told_how_to_get_it(
    config_for: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; os.environ['GARDEN_API_KEY']"
    servers = {"garden": {"command": "python", "args": ["-c", code]}}
    monkeypatch.setenv("GARDEN_API_KEY", "s3cret")
    with pytest.raises(ConfigError, match="last output: KeyError: 'GARDEN_API_KEY'") as caught:
        await probe(config_for(servers))
    hint = '"env": {"GARDEN_API_KEY": "${GARDEN_API_KEY}"}'
    assert f"(commands receive only the variables in env: {hint})" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    monkeypatch.delenv("GARDEN_API_KEY")
    with pytest.raises(ConfigError, match=r"GARDEN_API_KEY'$"):
        await probe(config_for(servers))


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-c", "open('left', 'w')"],
        ["python", "-c", "import sqlite3; sqlite3.connect('left').execute('CREATE TABLE a (b)')"],
        # Its last line is its version.
        ["node", "-e", "require('fs').writeFileSync('left', '')"],
    ],
)
async def test_a_command_that_may_not_write_is_told_what_opens_a_path(
    config_for: ConfigFor, tmp_path: Path, command: list[str]
) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    server = {"command": command[0], "args": command[1:], "cwd": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"; --tool_writable_paths names what tools may write"):
        await probe(config_for({"x": server}))
    unheard = "the command exited without output"
    with pytest.raises(ConfigError, match=unheard):
        await probe(config_for({"x": {**server, "writable": [str(tmp_path)]}}))
    assert (tmp_path / "left").exists()


async def test_a_server_whose_tools_may_not_write_is_logged_once(
    config_for: ConfigFor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes.py").write_text(NOTES)
    server = {"command": "python", "args": ["notes.py"], "cwd": str(tmp_path), "per_rollout": True}
    async with connect_tools(config_for({"s": server}, log_dir=tmp_path / "logs")) as box:
        for _ in range(2):
            async with box.for_rollout() as rollout:
                assert (await rollout.call("note", {})).is_error
    (text,) = (one.getMessage() for one in caplog.records if "refused" in one.getMessage())
    assert text == (
        f"a tool server was refused a path (see {tmp_path}/logs/tool_s.log); "
        "--tool_writable_paths names what tools may write to"
    )


async def test_a_command_reads_its_folder_and_has_a_home_of_its_own(
    config_for: ConfigFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/notes.txt").write_text("mine")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/goods.txt").write_text("ours")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    server = {"command": "python", "args": [str(PRYING)], "cwd": str(tmp_path / "work")}
    async with connect_tools(config_for({"x": server})) as box:
        for path in ("~/notes.txt", str(tmp_path / "home/notes.txt")):
            assert "No such file" in (await box.call("read", {"path": path})).content
        assert (await box.call("read", {"path": "goods.txt"})).content == "ours"
        assert "Read-only" in (await box.call("write", {"path": "left", "text": ""})).content
        seen = json.loads((await box.call("variables", {})).content)
        assert seen["TMPDIR"] == seen["HOME"]
        for path in (f"{seen['HOME']}/left", "/tmp/left", "/dev/shm/left", "/dev/null"):
            result = await box.call("write", {"path": path, "text": "text"})
            assert result.content == path


async def test_a_command_may_take_long_to_answer_but_not_for_ever(config_for: ConfigFor) -> None:
    silent = {"command": sys.executable, "args": ["-c", "import sys; sys.stdin.read()"]}
    config = config_for({"x": silent}, start_timeout_seconds=0.2, connect_timeout_seconds=60)
    with pytest.raises(ConfigError, match=r"is unreachable: .*no response within 0\.2 s$"):
        await probe(config)
    says = "import sys; sys.stderr.write('Uvicorn running on http://x\\n'); sys.stderr.flush(); sys.stdin.read()"
    speaking = {"command": sys.executable, "args": ["-c", says]}
    # Python starts within this time even on a loaded machine.
    config = config_for({"x": speaking}, start_timeout_seconds=5)
    with pytest.raises(
        ConfigError, match="no response within 5 s; last output: Uvicorn running on"
    ):
        await probe(config)


async def test_probing_names_an_address_that_is_no_mcp_server(
    server_url: str, config_for: ConfigFor
) -> None:
    with pytest.raises(ConfigError, match="/elsewhere is unreachable: Not Found"):
        await probe(config_for(server_url.replace("/mcp", "/elsewhere")))


async def test_probing_lists_the_tools(server_url: str, config_for: ConfigFor) -> None:
    specs = await probe(config_for(server_url, tool_names=["add"]))
    assert [spec.name for spec in specs] == ["add"]


async def test_calls_that_the_server_did_not_take_up_are_repeated(
    server_url: str, config_for: ConfigFor, shared_count_file: Path
) -> None:
    before = shared_count_file.stat().st_size if shared_count_file.exists() else 0
    async with connect_tools(config_for(f"{server_url}?fail=503:2")) as box:
        assert (await box.call("count", {})).content == "counted"
    assert shared_count_file.stat().st_size == before + 1
    async with connect_tools(config_for(f"{server_url}?fail=429:9")) as box:
        with pytest.raises(
            ToolError, match=r"'default' at http.*/mcp failed on every attempt: HTTP 429"
        ):
            await box.call("count", {})


async def test_a_lost_answer_is_asked_for_again_only_where_that_is_safe(
    server_url: str, config_for: ConfigFor, shared_count_file: Path
) -> None:
    def carried_out() -> int:
        return shared_count_file.stat().st_size if shared_count_file.exists() else 0

    before = carried_out()
    async with connect_tools(config_for(f"{server_url}?fail=502:1:after")) as box:
        with pytest.raises(ToolError, match="lost the connection during a call: HTTP 502"):
            await box.call("count", {})
    assert carried_out() == before + 1
    async with connect_tools(config_for(f"{server_url}?fail=504:1:after")) as box:
        assert (await box.call("count_idempotent", {})).content == "counted"
    assert carried_out() == before + 3
    allowed = config_for(f"{server_url}?fail=500:1:after", retry_lost_calls=True)
    async with connect_tools(allowed) as box:
        assert (await box.call("count", {})).content == "counted"
    assert carried_out() == before + 5


async def test_a_refusal_is_not_repeated(server_url: str, config_for: ConfigFor) -> None:
    async with connect_tools(config_for(f"{server_url}?fail=401:9")) as box:
        with pytest.raises(ToolError, match="refused the call: HTTP 401"):
            await box.call("add", {"a": 1, "b": 2})


async def test_a_killed_server_fails_its_calls_and_serves_again_when_it_is_back(
    start_server: Callable[..., Any], config_for: ConfigFor
) -> None:
    server = start_server()
    async with connect_tools(config_for(server.url)) as box:
        waiting = asyncio.create_task(box.call("slow", {"seconds": 60}))
        assert (await box.call("add", {"a": 1, "b": 2})).content == "3"
        server.kill()
        with pytest.raises(ToolError, match="lost the connection during a call"):
            await waiting
        with pytest.raises(ToolError, match="failed on every attempt: ConnectionRefusedError"):
            await box.call("add", {"a": 1, "b": 2})
        start_server(port=server.port)
        assert (await box.call("add", {"a": 1, "b": 2})).content == "3"


async def test_a_stdio_server_that_dies_is_started_again(
    config_for: ConfigFor, stdio_server: dict[str, object]
) -> None:
    async with connect_tools(config_for({"local": stdio_server})) as box:
        assert (await box.call("die_once", {})).content == "alive"
        with pytest.raises(ToolError, match="lost the connection during a call"):
            await box.call("die", {})
        assert (await box.call("add", {"a": 1, "b": 2})).content == "3"


async def test_servers_with_state_give_every_rollout_a_session_of_its_own(
    start_server: Callable[..., Any], config_for: ConfigFor
) -> None:
    url = start_server("stateful").url
    config = config_for({"s": {"url": url, "per_rollout": True}})
    async with (
        connect_tools(config) as box,
        box.for_rollout() as first,
        box.for_rollout() as second,
    ):
        await first.call("note", {"text": "a"})
        await second.call("note", {"text": "b"})
        assert (await first.call("note", {"text": "c"})).content == "a c"
        assert (await second.call("note", {"text": "d"})).content == "b d"


async def test_a_server_that_keeps_files_has_a_directory_for_each_rollout(
    config_for: ConfigFor,
) -> None:
    server = {
        "command": "python",
        "args": [str(TOOL_SERVER), "${rollout_dir}/calls_of_rollout.log"],
        "per_rollout": True,
    }
    async with connect_tools(config_for({"s": server})) as box:
        async with box.for_rollout() as first, box.for_rollout() as second:
            for rollout in (first, first, second):
                assert (await rollout.call("look", {"key": "lamp"})).content == "7"
            words: list[str] = []
            for child in psutil.Process().children(True):
                with contextlib.suppress(psutil.NoSuchProcess):  # another test's
                    words += child.cmdline()
            logs = {Path(word) for word in words if word.endswith("/calls_of_rollout.log")}
            written = [log.read_text().count("\n") for log in logs if log.exists()]
        assert sorted(written) == [1, 2]
        assert not any(log.exists() for log in logs)


async def test_what_a_rollout_leaves_behind_is_removed_without_holding_up_others(
    config_for: ConfigFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed_in = []

    def noted(folder: Path) -> None:
        removed_in.append(threading.current_thread())
        remove_folder(folder)

    monkeypatch.setattr("agentrl.tools.servers.client_session.remove_folder", noted)
    server = {"command": "python", "args": [str(TOOL_SERVER), "${rollout_dir}/calls.log"]}
    async with connect_tools(config_for({"s": {**server, "per_rollout": True}})) as box:
        async with box.for_rollout() as rollout:
            assert (await rollout.call("look", {"key": "lamp"})).content == "7"
        assert removed_in
        assert threading.main_thread() not in removed_in


async def test_a_session_that_ended_with_its_state_fails_the_rollout_and_is_opened_again(
    start_server: Callable[..., Any], config_for: ConfigFor
) -> None:
    server = start_server("stateful")
    config = config_for({"s": {"url": server.url, "per_rollout": True}})
    async with connect_tools(config) as box, box.for_rollout() as rollout:
        assert (await rollout.call("note", {"text": "a"})).content == "a"
        server.kill()
        start_server("stateful", port=server.port)
        with pytest.raises(ToolError, match="lost its session, and with it the state"):
            await rollout.call("note", {"text": "b"})
        async with box.for_rollout() as next_rollout:
            assert (await next_rollout.call("note", {"text": "c"})).content == "c"


async def test_an_ended_session_without_state_is_opened_again(
    start_server: Callable[..., Any], config_for: ConfigFor
) -> None:
    server = start_server("sse")
    url = server.url.replace("/mcp", "/sse")
    async with connect_tools(config_for({"s": {"url": url, "type": "sse"}})) as box:
        assert (await box.call("add", {"a": 1, "b": 2})).content == "3"
        waiting = asyncio.create_task(box.call("slow", {"seconds": 60}))
        assert (await box.call("add", {"a": 1, "b": 2})).content == "3"
        server.kill()
        with pytest.raises(ToolError, match="lost the connection during a call"):
            await waiting
        start_server("sse", port=server.port)
        assert (await box.call("add", {"a": 1, "b": 2})).content == "3"


async def test_a_cancelled_call_leaves_the_connection_usable(
    server_url: str, config_for: ConfigFor
) -> None:
    async with connect_tools(config_for(server_url)) as box:
        waiting = asyncio.create_task(box.call("slow", {"seconds": 60}))
        await box.call("add", {"a": 1, "b": 2})
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await box.call("add", {"a": 1, "b": 2})).content == "3"


async def test_blocked_tools_are_neither_shown_nor_called(
    server_url: str, config_for: ConfigFor
) -> None:
    servers = {"one": {"url": server_url}, "two": {"url": server_url}}
    config = config_for(
        servers, tool_names=["add", "fail", "crash"], blocked_tools=["fail", "two.add"]
    )
    async with connect_tools(config) as box:
        assert [spec.name for spec in box.specs] == ["one.add", "one.crash", "two.crash"]
        assert (await box.call("two.add", {"a": 1, "b": 2})).is_error
    with pytest.raises(ConfigError, match="no MCP server offers the tool 'ad'"):
        await probe(config_for(server_url, blocked_tools=["ad"]))


async def test_a_tool_that_reports_progress_is_given_time(
    config_for: ConfigFor, stdio_server: dict[str, object]
) -> None:
    config = config_for({"s": stdio_server}, call_timeout_seconds=1.0, max_call_seconds=2.5)
    async with connect_tools(config) as box:
        patient, silent, endless = await asyncio.gather(
            box.call("steady", {"seconds": 1.6, "reports": 8}),
            box.call("steady", {"seconds": 1.6, "reports": 1}),
            box.call("steady", {"seconds": 300, "reports": 1500}),
        )
    assert (patient.content, patient.is_error) == ("done", False)
    assert (silent.content, silent.is_error) == ("Error: no result within 1 s", True)
    assert endless.is_error
    assert 2 < endless.seconds < PATIENCE


async def test_a_cancelled_call_is_cancelled_at_the_server(
    config_for: ConfigFor, stdio_server: dict[str, object], count_file: Path
) -> None:
    async def until(mark: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while not count_file.exists() or count_file.read_text() != mark:
                await box.call("add", {"a": 1, "b": 1})

    async with connect_tools(config_for({"s": stdio_server})) as box:
        waiting = asyncio.create_task(box.call("linger", {}))
        await until("waiting")
        waiting.cancel()
        await until("cancelled")
