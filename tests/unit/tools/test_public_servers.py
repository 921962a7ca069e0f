"""MCP servers that others wrote, from PyPI and npm, installed into a cache folder when missing."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from harness.processes import listening_process

from agentrl.tools import ToolsConfig, connect_tools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ConfigFor = Callable[..., ToolsConfig]
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl" / "mcp-servers"
_INSTALL_SECONDS = 400
_PYTHON_PACKAGES = ("mcp-server-time==2026.10.19", "mcp-server-fetch==2026.10.24")
_NODE_PACKAGES = (
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
)


def run_or_skip(command: list[str]) -> None:
    """Run an installer; without its registry there is nothing to test."""
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_INSTALL_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"{command[0]} cannot install {command[-1]}: {said.strip()[-200:]}")


@pytest.fixture(scope="session")
def python_servers() -> Path:
    """The bin folder of an environment with the servers from PyPI."""
    home = _CACHE / "pypi"
    if not (home / "bin" / "mcp-server-fetch").exists():
        run_or_skip([sys.executable, "-m", "venv", str(home)])
        run_or_skip([str(home / "bin" / "pip"), "install", "-q", *_PYTHON_PACKAGES])
    return home / "bin"


@pytest.fixture(scope="session")
def node_servers() -> Path:
    """The bin folder of the servers from npm."""
    home = _CACHE / "npm"
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    if not (home / "node_modules" / ".bin" / "mcp-server-filesystem").exists():
        home.mkdir(parents=True, exist_ok=True)
        run_or_skip(["npm", "install", "--silent", "--prefix", str(home), *_NODE_PACKAGES])
    return home / "node_modules" / ".bin"


@pytest.fixture
def local_page(tmp_path: Path) -> Iterator[str]:
    """The address of a web page on this machine."""
    (tmp_path / "page.html").write_text(
        "<html><body><h1>Lamps</h1><p>The desk lamp costs 21 euro.</p></body></html>"
    )
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/page.html"
        server.shutdown()
        thread.join()


def patient(config_for: ConfigFor, servers: dict[str, object]) -> ToolsConfig:
    return config_for(servers, connect_timeout_seconds=60.0, call_timeout_seconds=60.0)


async def test_the_time_server_converts_times(config_for: ConfigFor, python_servers: Path) -> None:
    server = {"command": str(python_servers / "mcp-server-time"), "args": ["--local-timezone=UTC"]}
    async with connect_tools(patient(config_for, {"time": server})) as box:
        assert {"get_current_time", "convert_time"} <= {spec.name for spec in box.specs}
        converted = await box.call(
            "convert_time",
            {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Kolkata"},
        )
        wrong = await box.call("get_current_time", {"timezone": "Nowhere/Land"})
    assert not converted.is_error
    assert "17:30" in converted.content
    assert wrong.is_error


async def test_the_fetch_server_reads_a_page(
    config_for: ConfigFor, python_servers: Path, local_page: str
) -> None:
    command = str(python_servers / "mcp-server-fetch")
    # The page is on this machine, which the server reads from only when it is told to.
    local = {"command": command, "args": ["--ignore-robots-txt", "--allow-private-ips"]}
    careful = {"command": command, "args": ["--ignore-robots-txt"]}
    async with connect_tools(patient(config_for, {"local": local, "careful": careful})) as box:
        page = await box.call("local.fetch", {"url": local_page, "raw": True})
        missing = await box.call("local.fetch", {"url": local_page.replace("page", "none")})
        refused = await box.call("careful.fetch", {"url": local_page})
    assert "The desk lamp costs 21 euro." in page.content
    assert missing.is_error
    assert refused.is_error
    assert "not a public address" in refused.content


async def test_the_filesystem_server_reads_and_writes_below_its_root_only(
    config_for: ConfigFor, node_servers: Path, tmp_path: Path
) -> None:
    command = str(node_servers / "mcp-server-filesystem")
    server = {"command": command, "args": [str(tmp_path)], "writable": [str(tmp_path)]}
    async with connect_tools(patient(config_for, {"files": server})) as box:
        target = str(tmp_path / "note.txt")
        assert not (await box.call("write_file", {"path": target, "content": "21"})).is_error
        assert "21" in (await box.call("read_text_file", {"path": target})).content
        assert (await box.call("read_text_file", {"path": "/etc/hostname"})).is_error


@pytest.mark.usefixtures("node_servers")
async def test_npx_downloads_a_server_though_the_home_is_read_only(
    config_for: ConfigFor, tmp_path: Path
) -> None:
    server = {"command": "npx", "args": ["-y", _NODE_PACKAGES[1], str(tmp_path)]}
    config = patient(config_for, {"files": server})
    async with connect_tools(config.model_copy(update={"start_timeout_seconds": 300.0})) as box:
        (tmp_path / "note.txt").write_text("21")
        result = await box.call("read_text_file", {"path": str(tmp_path / "note.txt")})
        assert "21" in result.content


@pytest.mark.parametrize("transport", ["stdio", "streamableHttp"])
async def test_the_everything_server_answers_in_every_kind_of_content(
    config_for: ConfigFor, node_servers: Path, transport: str
) -> None:
    command = str(node_servers / "mcp-server-everything")
    if transport == "stdio":
        await check_everything(patient(config_for, {"all": {"command": command}}))
        return
    with listening_process([command, transport], environment={"PORT": "{port}"}) as url:
        servers = {"all": {"url": f"{url}/mcp", "per_rollout": True}}
        await check_everything(config_for(servers, call_timeout_seconds=60.0))


async def check_everything(config: ToolsConfig) -> None:
    async with connect_tools(config) as box, box.for_rollout() as mine:
        names = {spec.name for spec in box.specs}
        assert (await mine.call("echo", {"message": "hällo"})).content == "Echo: hällo"
        total = next(name for name in ("get-sum", "add") if name in names)
        assert "42" in (await mine.call(total, {"a": 40, "b": 2})).content
        image = next(name for name in ("get-tiny-image", "getTinyImage") if name in names)
        assert "[image image/png, " in (await mine.call(image, {})).content
        assert (await mine.call("echo", {})).is_error
