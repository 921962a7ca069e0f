import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mcp import Client, MCPError
from mcp.types import TextContent
from support.environment_up import TOKEN, RunningEnvironment, StartEnvironment, environments
from support.patience import PATIENCE

from agentrl.cli.main import main
from agentrl.errors import ToolError
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers

SERVER = Path(__file__).parents[3] / "support/mcp_server.py"


@pytest.fixture
def start_environment(tmp_path: Path) -> Iterator[StartEnvironment]:
    with environments(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An MCP server that is started over its pipes."""
    count_file = tmp_path_factory.mktemp("child") / "count"
    return {"command": sys.executable, "args": [str(SERVER), "stdio", str(count_file)]}


@pytest.fixture(scope="module")
def environment(
    child: dict[str, Any], server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEnvironment]:
    """One that tests share, with a server of each client's own and one that is elsewhere."""
    with environments(tmp_path_factory.mktemp("shared")) as start:
        yield start({"near": child, "far": {"url": server_url}})


async def until_alone(environment: RunningEnvironment) -> None:
    """Wait until the environment has forgotten all clients."""
    async with asyncio.timeout(PATIENCE):
        while environment.health()["sessions"]:
            await asyncio.sleep(0.05)


async def said(client: Client, tool: str, **arguments: object) -> str:
    result = await client.call_tool(tool, dict(arguments))
    assert isinstance(result.content[0], TextContent)
    return result.content[0].text


async def test_without_the_token_nobody_gets_in(environment: RunningEnvironment) -> None:
    await until_alone(environment)
    async with httpx.AsyncClient() as http:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": environment.token},
        ):
            answer = await http.post(environment.url, json={}, headers=headers)
            assert answer.status_code == 401
    with pytest.raises((MCPError, ExceptionGroup)):
        async with environment.client(token="wrong"):
            pass
    assert environment.health() == {"status": "ok", "servers": ["far", "near"], "sessions": 0}
    async with environment.client(servers="near") as client:
        assert await said(client, "add", a=1, b=2) == "3"
        assert environment.health()["sessions"] == 1


async def test_the_filter_header_hides_the_other_servers(environment: RunningEnvironment) -> None:
    async with environment.client() as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert {"near.add", "far.add"} <= names
        assert await said(client, "far.add", a=1, b=2) == "3"
    async with environment.client(servers="near") as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert "add" in names
        assert not any("." in name for name in names)
        with pytest.raises(MCPError, match=r"no tool 'far\.add' here"):
            await said(client, "far.add", a=1, b=2)
    async with environment.client(servers="near, nowhere") as client:
        with pytest.raises(MCPError, match=r"no server 'nowhere' here \(servers: far, near\)"):
            await client.list_tools()


async def test_clients_have_children_of_their_own_that_start_lazily_and_again_after_a_crash(
    environment: RunningEnvironment,
) -> None:
    await until_alone(environment)
    async with (
        environment.client(servers="near") as one,
        environment.client(servers="near") as other,
    ):
        assert await said(one, "remember", text="a") == "a"
        assert environment.health()["sessions"] == 1
        assert await said(other, "remember", text="b") == "b"
        assert await said(one, "remember", text="c") == "a c"
        with pytest.raises(MCPError, match="lost the connection during a call"):
            await said(one, "die")
        assert await said(one, "remember", text="new") == "new"
        assert await said(other, "remember", text="d") == "b d"
    await until_alone(environment)


@pytest.mark.slow
async def test_clients_of_the_protocol_without_sessions_stay_apart_by_the_names_they_give(
    start_environment: StartEnvironment, child: dict[str, Any]
) -> None:
    environment = start_environment({"child": child})
    mine, yours = ({"agentrl-client": f"{name}-0123456789abcdef"} for name in ("mine", "yours"))
    async with environment.client(more=mine) as one, environment.client(more=yours) as other:
        assert one.protocol_version == other.protocol_version == "2026-07-28"
        assert await said(one, "remember", text="a") == "a"
        assert await said(other, "remember", text="b") == "b"
        assert await said(one, "remember", text="c") == "a c"
        assert environment.health()["sessions"] == 2
    async with environment.client(more=mine) as again:
        assert await said(again, "remember", text="d") == "a c d"
    ending = {"Authorization": f"Bearer {environment.token}", **mine}
    async with httpx.AsyncClient() as http:
        assert (await http.delete(environment.url, headers=ending)).status_code == 204
    assert environment.health()["sessions"] == 1
    # A name that others could guess is none: such a client gets a session, as before.
    async with environment.client(more={"agentrl-client": "me"}) as short:
        assert short.protocol_version == "2025-11-25"


@pytest.mark.parametrize("num_clients", [4, pytest.param(50, marks=pytest.mark.slow)])
async def test_many_clients_at_once_stay_apart(
    start_environment: StartEnvironment, start_server: Callable[..., Any], num_clients: int
) -> None:
    environment = start_environment({"notes": {"url": start_server("stateful").url}})
    all_here = asyncio.Barrier(num_clients)

    async def take_notes(number: int) -> str:
        async with environment.client() as client:
            await said(client, "note", text=f"first{number}")
            await all_here.wait()
            return await said(client, "note", text=f"second{number}")

    answers = await asyncio.gather(*(take_notes(number) for number in range(num_clients)))
    assert answers == [f"first{n} second{n}" for n in range(num_clients)]


async def test_samplers_use_it_by_the_printed_json_and_tell_its_failures_from_a_tools(
    start_environment: StartEnvironment,
    child: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = start_environment(
        {"files": {**child, "env": {"SEEN": "${SEEN}", "ALSO": "${ALSO:-by default}"}}},
        environment={"SEEN": "by the child", "MCP_SERVER_TOKEN": TOKEN},
    )
    assert TOKEN not in json.dumps(environment.connection)
    monkeypatch.setenv("MCP_SERVER_TOKEN", TOKEN)
    config = ToolsConfig(servers=load_mcp_servers(environment.connection), max_retries=0)
    async with connect_tools(config) as box:
        assert (await box.call("environment", {"name": "SEEN"})).content == "by the child"
        assert (await box.call("environment", {"name": "ALSO"})).content == "by default"
        assert (await box.call("fail", {"reason": "no such page"})).is_error
        with pytest.raises(ToolError, match="lost the connection during a call"):
            await box.call("die", {})


async def test_progress_of_a_child_reaches_the_client(environment: RunningEnvironment) -> None:
    reports: list[tuple[float, float | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        reports.append((progress, total))

    async with environment.client(servers="near") as client:
        await client.call_tool("steady", {"seconds": 0.2, "reports": 2}, progress_callback=note)
    assert reports == [(1, 2), (2, 2)]


async def test_a_client_that_left_without_a_word_is_forgotten(
    start_environment: StartEnvironment, child: dict[str, Any]
) -> None:
    environment = start_environment({"files": child}, "--session_idle_seconds", "1")
    async with environment.client() as client:
        assert await said(client, "add", a=1, b=2) == "3"
        await until_alone(environment)


async def test_it_ends_while_clients_and_a_call_are_there(
    start_environment: StartEnvironment, child: dict[str, Any]
) -> None:
    environment = start_environment({"files": child})
    under_way = asyncio.Event()

    async def note(progress: float, total: float | None, message: str | None) -> None:
        under_way.set()

    async def call() -> None:
        async with environment.client() as client:
            slow = {"seconds": 2 * PATIENCE, "reports": 10_000}
            await client.call_tool("steady", slow, progress_callback=note)

    calling = asyncio.create_task(call())
    await asyncio.wait_for(under_way.wait(), PATIENCE)
    children = psutil.Process(environment.process.pid).children(recursive=True)
    assert children
    environment.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(environment.process.wait, PATIENCE) == 0
    assert not psutil.wait_procs(children, timeout=PATIENCE)[1]
    calling.cancel()
    await asyncio.wait({calling})


PRYING = {
    "command": sys.executable,
    "args": [str(Path(__file__).parents[3] / "support/prying_server.py")],
}


async def test_servers_of_one_client_reach_neither_secrets_nor_what_belongs_to_another(
    start_environment: StartEnvironment, tmp_path: Path
) -> None:
    secret = "planted-in-the-environment"
    (tmp_path / ".env").write_text(f"ALSO_SECRET={secret}")
    environment = start_environment(
        {"prying": {**PRYING, "env": {"GIVEN": "yes"}}},
        environment={"MCP_SERVER_TOKEN": secret, "MONGODB_URI": f"mongodb://u:{secret}@h/x"},
    )
    async with environment.client(token=secret) as one, environment.client(token=secret) as other:
        seen = json.loads(await said(one, "variables"))
        assert seen["GIVEN"] == "yes"
        assert not {"MCP_SERVER_TOKEN", "MONGODB_URI", "ALSO_SECRET"} & seen.keys()
        assert secret not in json.dumps(seen)
        assert await said(one, "spy", word=secret) == "nothing"
        assert await said(one, "find", folder=str(tmp_path), word=secret) == "nothing"
        ours = "a note of the first client"
        places = [await said(one, "write", path=name, text=ours) for name in ("n.txt", "~/m.txt")]
        for place in places:
            assert await said(one, "read", path=place) == ours
            assert "No such file" in await said(other, "read", path=place)
        for folder in (tmp_path, Path(tempfile.gettempdir()), Path("/dev/shm")):
            await said(one, "write", path=str(folder / "left-behind"), text=ours)
            assert "No such file" in await said(other, "read", path=str(folder / "left-behind"))
            assert not (folder / "left-behind").exists()
        assert "No such process" in await said(one, "kill", pid=environment.process.pid)
    async with asyncio.timeout(PATIENCE):
        while any(Path(place).parent.exists() for place in places):
            await asyncio.sleep(0.05)


async def test_sessions_and_their_memory_are_bounded(
    start_environment: StartEnvironment,
) -> None:
    environment = start_environment(
        {"prying": PRYING}, "--max_sessions", "1", "--server_memory_megabytes", "400"
    )
    async with environment.client() as one, environment.client() as other:
        assert await said(one, "take_memory", megabytes=1000) == "no memory"
        with pytest.raises(MCPError, match="1 sessions are open"):
            await said(other, "take_memory", megabytes=1)


async def test_files_in_memory_count_as_memory_of_a_session(
    start_environment: StartEnvironment,
) -> None:
    environment = start_environment({"prying": PRYING}, "--server_memory_megabytes", "300")
    for kind in ("memfd", "shm", "deleted"):
        async with environment.client() as one:
            assert await said(one, "take_files", megabytes=50, kind=kind) == "taken", kind
            pids = [child.pid for child in psutil.Process(environment.process.pid).children()]
            with suppress(MCPError):  # it may end before it can answer
                await said(one, "take_files", megabytes=300, kind=kind)
            async with asyncio.timeout(PATIENCE):
                while psutil.pid_exists(pids[0]):
                    await asyncio.sleep(0.1)
        await until_alone(environment)


@pytest.mark.slow
async def test_what_a_server_says_is_kept_in_bounds_and_quoted_when_it_dies(
    start_environment: StartEnvironment, tmp_path: Path
) -> None:
    dying = {**PRYING, "args": [*PRYING["args"], "--dies"]}
    environment = start_environment(
        {"prying": PRYING, "dying": dying}, "--logs_dir", str(tmp_path / "logs")
    )
    async with environment.client(servers="prying") as client:
        await said(client, "complain", text="forged\x1b]0;t\x07", times=1)
        assert await said(client, "complain", text="z" * 100, times=95_000) == "said"
    async with environment.client(servers="dying") as client:
        with pytest.raises(MCPError, match=r"last output: no module named .x1b.31mshop"):
            await client.list_tools()
    log = tmp_path / "logs/env_prying.log"
    assert "starting up\nforged\\x1b]0;t\\x07\n" in log.read_text()
    assert log.stat().st_size < 9 * 2**20
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("servers", "flags", "message"),
    [
        (None, (), "needs --mcp_servers FILE"),
        ({"a": {"command": "x", "env": {"KEY": "${NO_SUCH_VARIABLE}"}}}, (), "NO_SUCH_VARIABLE"),
        ({"a": {"command": "x"}}, ("--env_file", "absent.env"), "absent.env: no such file"),
        ({"a": {"command": "x"}}, ("--host", "192.0.2.1", "--port", "1"), "cannot listen on"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    servers: dict[str, Any] | None,
    flags: tuple[str, ...],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["env", "up", *flags]
    if servers is not None:
        words += ["--mcp_servers", json.dumps({"mcpServers": servers})]
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert len(said.err.splitlines()) == 1
