"""Servers that others wrote: what docs/mcp-servers.md says of them is what they answer."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mcp_servers", ROOT / "scripts/mcp_servers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mcp_servers"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


SCRIPT = _load()


def test_the_page_has_a_row_for_every_server() -> None:
    page = SCRIPT.PAGE.read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    names = [server.name.replace("`", "") for server in SCRIPT.SERVERS]
    assert [row[0].removeprefix("| ").replace("`", "") for row in rows] == names
    assert len(rows) >= 12


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", SCRIPT.SERVERS, ids=lambda server: server.name)
async def test_a_server_answers_as_the_page_says(server: Any) -> None:
    try:
        SCRIPT.install([server])
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"cannot be installed: {error}")
    row = await SCRIPT.row_of(server)
    assert row in SCRIPT.PAGE.read_text().splitlines()
    assert ", called, " in row
