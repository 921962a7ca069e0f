from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.tiny_tokenizer import write_tokenizer
from support.play import run_tool_server

from agentrl.renderers.renderer import Renderer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def renderer(tokenizer_dir: Path) -> Renderer:
    return Renderer.load(tokenizer_dir)


@pytest.fixture(scope="session")
def tool_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "calls.log"
    path.touch()
    return path


@pytest.fixture(scope="session")
def tools_url(tool_log: Path) -> Iterator[str]:
    """Address of a real MCP server over streamable HTTP."""
    with run_tool_server(tool_log) as url:
        yield url
