"""What the launcher makes for a run, and who can read it."""

import asyncio
import contextlib
import re
import sys
from pathlib import Path

import psutil
import pytest

from agentrl.config.command_line import parse_flags
from agentrl.config.loading import build_config, secret_environment
from agentrl.config.sections import RootConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.launcher.cluster import tool_server_start
from agentrl.launcher.cluster.local_cluster import LocalCluster
from agentrl.rollout.worker.resources import tools_config
from agentrl.runtime.processes.wall import wall_gap
from agentrl.tools import connect_tools

PRYING = Path(__file__).parents[3] / "support/prying_server.py"


def config_in(folder: Path, **flags: str) -> RootConfig:
    places = {"output_dir": folder / "out", "mongo_data_dir": folder / "mongo", "mongo_port": 0}
    return build_config({"run_name": "mine", **places, **flags})


async def test_every_run_gets_keys_of_its_own_and_what_joins_it_reads_them(tmp_path: Path) -> None:
    async with LocalCluster(config_in(tmp_path)) as cluster:
        store = await cluster.open_store()
        cluster.write_config()
        given = secret_environment(cluster.config)
        assert set(given) == {"MONGODB_URI", "AGENTRL_API_KEY", "AGENTRL_ADMIN_KEY"}
        assert len(set(given.values())) == 3
        assert re.fullmatch(r"mongodb://agentrl:\*\*\*@127.*", store.redacted_uri)
        public = cluster.config_path.read_text()
        assert [secret for secret in given.values() if secret in public] == []
        joined = parse_flags(["--config", str(cluster.config_path)])
        assert joined.inference == cluster.config.inference
        assert joined.private_mongo_dir == tmp_path / "mongo"
    open_paths = [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o077]
    inside = [path for path in open_paths if path.parent not in open_paths]
    assert [path for path in inside if not _is_shut(path, tmp_path)] == []


def _is_shut(path: Path, root: Path) -> bool:
    """Return whether a directory on the way keeps other users out."""
    above = [path, *path.parents]
    between = above[: above.index(root)]
    return any(step.stat().st_mode & 0o077 == 0 for step in between)


async def test_the_users_own_keys_win(tmp_path: Path) -> None:
    config = config_in(tmp_path, inference_api_key="my-own-key")
    async with LocalCluster(config) as cluster:
        await cluster.open_store()
        cluster.write_config()
        given = secret_environment(cluster.config)
        assert given["AGENTRL_API_KEY"] == "my-own-key"
        assert given["AGENTRL_ADMIN_KEY"] != "my-own-key"
    private = cluster.config_path.with_name("config.secrets.yaml").read_text()
    assert "my-own-key" not in private


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mcp_tool_names": "prise"}, r"no MCP server offers the tool 'prise' \(available: "),
        pytest.param(
            {"max_prompt_tokens": "100"},
            r"tools take \d+ tokens .* a prompt may have 100",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_what_the_own_tool_server_lacks_is_told_before_samplers_start(
    tmp_path: Path, flags: dict[str, str], message: str
) -> None:
    server = f"{sys.executable} examples/shop/server.py --port {{port}}"
    async with LocalCluster(config_in(tmp_path, tool_server_command=server, **flags)) as cluster:
        await cluster.open_store()
        with pytest.raises(ConfigError, match=message):
            await cluster.start_tool_server()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "import no_such_module",
            r"exited with status 1; it does not inherit PYTHONPATH: if it needs it, give "
            r"--tool_server_env LANG,PYTHONPATH; its log .* ends with: ModuleNotFoundError: No module",
        ),
        (
            "import os; os.environ['SEARCH_KEY']",
            r"give --tool_server_env LANG,SEARCH_KEY; .*KeyErr",
        ),
        (
            "from pathlib import Path; Path('/usr/notes').touch()",
            r"status 1; --tool_writable_paths names what tools may write to; its log .* ends with: "
            r"OSError: \[Errno 30\] Read-only file system: '/usr/notes'$",
        ),
        ("raise ValueError('no key')", r"status 1; its log .* ends with: ValueError: no key$"),
        ("print('done')", r"exited with status 0; its log .*mine_tools.log ends with: done$"),
    ],
)
async def test_a_tool_server_that_ends_at_once_is_quoted_without_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    for name in ("PYTHONPATH", "SEARCH_KEY", "LANG"):
        monkeypatch.setenv(name, "C")
    (tmp_path / "server.py").write_text(program)
    server = f"{sys.executable} {tmp_path}/server.py {{port}}"
    flags = {"tool_server_env": "LANG", "logs_dir": str(tmp_path / "logs")}
    async with LocalCluster(config_in(tmp_path, tool_server_command=server, **flags)) as cluster:
        await cluster.open_store()
        with pytest.raises(AgentRLError, match=f"the tool server did not start: it .*{message}"):
            await cluster.start_tool_server()
        assert cluster.num_restarts == {}


async def test_a_tool_server_that_has_responded_is_restarted(tmp_path: Path) -> None:
    flags = {"logs_dir": str(tmp_path / "logs")}
    server = f"{sys.executable} examples/shop/server.py --port {{port}}"
    async with LocalCluster(config_in(tmp_path, tool_server_command=server, **flags)) as cluster:
        await cluster.open_store()
        await cluster.start_tool_server()
        port = str(cluster.config.tools.tool_server_url).rpartition(":")[2].partition("/")[0]
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended with the one before
                if child.cmdline()[-2:] == ["--port", port]:
                    child.kill()
        async with asyncio.timeout(60):
            while cluster.num_restarts != {"tools": 1}:
                await asyncio.sleep(0.05)


async def test_a_tool_server_without_mcp_is_told_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_server_start, "START_SECONDS", 0.0)
    flags = {"logs_dir": str(tmp_path / "logs")}
    server = f"{sys.executable} -m http.server {{port}}"
    async with LocalCluster(config_in(tmp_path, tool_server_command=server, **flags)) as cluster:
        await cluster.open_store()
        with pytest.raises(AgentRLError, match=r"serves no MCP at http://127.0.0.1:\d+/mcp; "):
            await cluster.start_tool_server()


@pytest.mark.skipif(wall_gap() is not None, reason="needs namespaces")
async def test_the_own_tool_server_sees_no_process_and_no_file_of_the_run(tmp_path: Path) -> None:
    server = f"{sys.executable} {PRYING} --port {{port}}"
    (tmp_path / "notes").mkdir()
    flags = {"tool_server_command": server, "tool_writable_paths": str(tmp_path / "notes")}
    async with LocalCluster(config_in(tmp_path, **flags)) as cluster:
        await cluster.open_store()
        cluster.write_config()
        password = secret_environment(cluster.config)["MONGODB_URI"].split(":")[2].split("@")[0]
        assert password in (tmp_path / "mongo/agentrl-password").read_text()
        await cluster.start_tool_server()
        async with connect_tools(tools_config(cluster.config.tools)) as box:
            for tool, arguments in (
                ("find", {"folder": str(tmp_path), "word": password}),
                ("spy", {"word": "--dbpath"}),  # of the run's mongod
            ):
                assert (await box.call(tool, arguments)).content == "nothing"
            for name in ("left", "notes/left"):
                await box.call("write", {"path": str(tmp_path / name), "text": "mine"})
            assert not (tmp_path / "left").exists()
            assert (tmp_path / "notes/left").read_text() == "mine"


async def test_servers_that_run_elsewhere_keep_their_keys(tmp_path: Path) -> None:
    config = config_in(tmp_path, inference_urls="http://127.0.0.1:1")
    async with LocalCluster(config) as cluster:
        await cluster.open_store()
        assert set(secret_environment(cluster.config)) == {"MONGODB_URI"}
