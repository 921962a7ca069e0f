"""Fixtures of MCP servers, for the conftest files that import them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl.tools import ToolsConfig, load_mcp_servers

SERVER = Path(__file__).parent / "mcp_server.py"


@dataclass
class ServerProcess:
    """A running HTTP server."""

    process: "subprocess.Popen[str]"
    port: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


StartServer = Callable[..., ServerProcess]


@pytest.fixture
def count_file(tmp_path: Path) -> Path:
    return tmp_path / "count"


def _start(kind: str, count_file: Path, port: int | None = None) -> ServerProcess:
    command = [sys.executable, str(SERVER), kind, str(count_file)]
    if port is not None:
        command.append(str(port))
    return ServerProcess(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))


@pytest.fixture
def start_server(count_file: Path) -> Iterator[StartServer]:
    """Start a server of the test's own."""
    started: list[ServerProcess] = []

    def start(kind: str = "stateless", port: int | None = None) -> ServerProcess:
        started.append(_start(kind, count_file, port))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def shared_count_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools") / "count"


@pytest.fixture(scope="session")
def server_url(shared_count_file: Path) -> Iterator[str]:
    """A stateless server that all tests share."""
    server = _start("stateless", shared_count_file)
    yield server.url
    server.kill()


def tools_config(servers: object, **options: object) -> ToolsConfig:
    defaults: dict[str, object] = {
        "max_retries": 2,
        "retry_delay_seconds": 0.05,
        "call_timeout_seconds": 10.0,
        "connect_timeout_seconds": 15.0,
    }
    return ToolsConfig.model_validate(
        {**defaults, "servers": load_mcp_servers(servers), **options}  # type: ignore[arg-type]
    )


@pytest.fixture
def config_for() -> Callable[..., ToolsConfig]:
    return tools_config


@pytest.fixture
def stdio_server(count_file: Path) -> dict[str, object]:
    args = [str(SERVER), "stdio", str(count_file)]
    return {"command": sys.executable, "args": args, "writable": [str(count_file.parent)]}
