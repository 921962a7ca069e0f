"""What a rollout's tool servers are told of its question: ids, columns, fixtures."""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from agentrl.errors import ConfigError, ToolError
from agentrl.runtime.loop_slots import LoopSlots
from agentrl.tools import ToolsConfig, connect_tools, load_mcp_servers
from agentrl.tools.servers import connection
from agentrl.tools.servers.client_session import McpSession
from agentrl.tools.servers.served_question import ServedQuestion

ConfigFor = Callable[..., ToolsConfig]
SERVER = '''
import json, os, sys
from pathlib import Path
from mcp.server.mcpserver import MCPServer

server = MCPServer("files")


@server.tool()
def told() -> str:
    """Return what the server was told."""
    return json.dumps({"argv": sys.argv[1:], "user": os.environ.get("AS_USER")})


@server.tool()
def read(path: str) -> str:
    """Read a file of the rollout."""
    return Path(path).read_text()


@server.tool()
def write(path: str, text: str) -> str:
    """Write a file of the rollout."""
    Path(path).write_text(text)
    return "written"


server.run("stdio")
'''


@pytest.fixture
def server(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "files_server.py"
    path.write_text(SERVER)
    return {
        "command": sys.executable,
        "args": [str(path)],
        "cwd": "${rollout_dir}",
        "per_rollout": True,
        "state": "folder",
    }


def question(folder: Path, name: str = "q1", **columns: Any) -> ServedQuestion:
    return ServedQuestion(name, f"train/0/{name}/0", columns, folder)


async def test_a_server_is_told_question_and_columns_and_they_open_no_path(
    server: dict[str, Any], config_for: ConfigFor, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret")
    server["args"] += ["--for", "${question_id}", "${row.level}", "${row.place}"]
    server["env"] = {"AS_USER": "${row.user}"}
    mine = question(tmp_path, level=3, user="mara", place=str(tmp_path / "key"))
    config = config_for({"s": server}, example=mine)
    async with connect_tools(config) as box, box.for_rollout(mine) as rollout:
        told = json.loads((await rollout.call("told", {})).content)
        opened = await rollout.call("read", {"path": str(tmp_path / "key")})
    assert told == {"argv": ["--for", "q1", "3", str(tmp_path / "key")], "user": "mara"}
    assert opened.is_error


async def test_a_program_is_found_from_the_directory_of_a_rollout_and_its_own_files_first(
    server: dict[str, Any],
    config_for: ConfigFor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("world.db", "data/world.db"):
        (tmp_path / name).touch()
    server |= {"args": ["files_server.py", "world.db"], "fixture": "world.db"}
    mine = question(tmp_path / "data")
    config = config_for({"s": server}, example=mine)
    async with connect_tools(config) as box, box.for_rollout(mine) as rollout:
        assert json.loads((await rollout.call("told", {})).content)["argv"] == ["world.db"]


async def test_each_rollout_works_on_its_own_copy_of_its_questions_fixture(
    server: dict[str, Any], config_for: ConfigFor, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    (data / "first" / "inner").mkdir(parents=True)
    (data / "first" / "inner" / "notes.txt").write_text("of the first")
    (data / "second.txt").write_text("of the second")
    server |= {"fixture": "${row.fixture}", "row": ["user"]}
    example = question(data, "a", fixture="first", user="mara")
    async with connect_tools(config_for({"s": server}, example=example)) as box:
        async with (
            box.for_rollout(question(data, "a", fixture="first", user="mara")) as one,
            box.for_rollout(question(data, "b", fixture="second.txt", user="noor")) as other,
        ):
            assert (await one.call("read", {"path": "inner/notes.txt"})).content == "of the first"
            assert (await other.call("read", {"path": "second.txt"})).content == "of the second"
            row = json.loads((await other.call("read", {"path": "row.json"})).content)
            assert row == {"question_id": "b", "user": "noor"}
            await one.call("write", {"path": "inner/notes.txt", "text": "changed"})
            state = one.snapshot()
        again = question(data, "a", fixture="first", user="mara")
        async with box.for_rollout(again, restored=state) as branch:
            assert (await branch.call("read", {"path": "inner/notes.txt"})).content == "changed"
        async with box.for_rollout(again) as fresh:
            assert (await fresh.call("read", {"path": "inner/notes.txt"})).content == "of the first"
    assert (data / "first" / "inner" / "notes.txt").read_text() == "of the first"


@pytest.mark.parametrize("name", ["../key", "..", "/etc/hostname", "link", "folder", "absent"])
async def test_a_fixture_leaves_the_folder_of_the_questions_in_no_way(
    server: dict[str, Any], config_for: ConfigFor, tmp_path: Path, name: str
) -> None:
    data = tmp_path / "data"
    (data / "folder").mkdir(parents=True)
    (tmp_path / "key").write_text("secret")
    (data / "link").symlink_to(tmp_path / "key")
    (data / "folder" / "inner").symlink_to(tmp_path / "key")
    server["fixture"] = "${row.fixture}"
    (data / "fine").mkdir()
    example = question(data, fixture="fine")
    async with connect_tools(config_for({"s": server}, example=example)) as box:
        with pytest.raises(ToolError, match=f"fixture '{name}' of question 'q1'"):
            async with box.for_rollout(question(data, fixture=name)):
                pass
        with pytest.raises(ConfigError, match="no column 'fixture'"):
            async with box.for_rollout(question(data)):
                pass


async def test_an_http_server_learns_which_rollout_a_session_serves(
    start_server: Callable[..., Any], config_for: ConfigFor, tmp_path: Path
) -> None:
    address = start_server("stateful").url
    mine = question(tmp_path, "näher", user="mara")
    server = {"url": address, "per_rollout": True, "headers": {"X-User": "${row.user}"}}
    config = config_for({"s": server}, example=mine)
    async with connect_tools(config) as box, box.for_rollout(mine) as rollout:
        names = "x-agentrl-question", "x-agentrl-rollout", "x-user"
        seen = [(await rollout.call("header", {"name": name})).content for name in names]
    assert seen == ["n%C3%A4her", "train/0/n%C3%A4her/0", "mara"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"command": "x", "args": ["${row.a}"]}, "requires"),
        ({"command": "x", "fixture": "a"}, '"fixture" and "row" require'),
        ({"url": "http://x/${row.a}", "per_rollout": True}, "supported only in"),
        ({"url": "http://x", "headers": {"a": "${rollout_dir}"}, "per_rollout": True}, "only in"),
    ],
)
def test_placeholders_stand_where_a_rollout_gives_them_values(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_mcp_servers({"s": fields})


def named(servers: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [load_mcp_servers({"s": one})["s"].named_columns for one in servers]


def test_the_columns_that_a_server_needs_are_known_before_the_start() -> None:
    base = {"command": "x", "per_rollout": True}
    assert named([base, {**base, "args": ["${row.b}"], "fixture": "f/${row.a}", "row": ["c"]}]) == [
        (),
        ("c", "b", "a"),
    ]


async def test_a_few_commands_start_at_once_and_the_others_wait(
    server: dict[str, Any], config_for: ConfigFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_starts", LoopSlots(2))
    opened, starting = McpSession.opened, {"now": 0, "most": 0}

    async def counted(session: McpSession) -> Client:
        starting["now"] += 1
        starting["most"] = max(starting.values())
        try:
            return await opened(session)
        finally:
            starting["now"] -= 1

    mine = question(tmp_path)
    async with connect_tools(config_for({"s": server}, example=mine)) as box:
        monkeypatch.setattr(McpSession, "opened", counted)

        async def told() -> bool:
            async with box.for_rollout(mine) as rollout:
                return (await rollout.call("told", {})).is_error

        assert await asyncio.gather(*(told() for _ in range(6))) == [False] * 6
    assert starting == {"now": 0, "most": 2}
