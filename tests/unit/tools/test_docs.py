"""docs/tools.md says what is so."""

import os
import re
import sys
from pathlib import Path

import pytest
from support.doc_blocks import DOCS, run_shell, write_blocks

from agentrl.errors import ConfigError
from agentrl.renderers.tool_calls.call_format_registry import get_tool_call_format
from agentrl.tools import load_mcp_servers


def test_every_block_of_the_page_runs_as_printed(tmp_path: Path) -> None:
    num_blocks, commands = write_blocks("tools.md", tmp_path)
    assert num_blocks == 8
    servers = load_mcp_servers(tmp_path / "servers.json")
    assert {name: server.transport for name, server in servers.items()} == {
        "web": "http",
        "old": "sse",
        "files": "stdio",
        "dock": "aggregator",
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(DOCS.parent / "src")}
    (command,) = commands
    shown, lamp, sofa, unknown = run_shell(command, tmp_path, environment).splitlines()
    assert "'name': 'in_stock', 'description': 'How many pieces of an item there are.'" in shown
    assert lamp == "lamp False 7"
    assert sofa.startswith("sofa True Error")
    assert unknown.startswith("Error: there is no tool named 'in_stok'. Did you mean in_stock?")


def test_the_table_lists_every_format() -> None:
    _, _, table = (DOCS / "tools.md").read_text().partition("| name | calls look like |")
    first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`([\w-]+)`", cell)}
    with pytest.raises(ConfigError) as error:
        get_tool_call_format("llama9")
    known = {*re.findall(r"[\w-]+", str(error.value).split("known: ")[1])}
    assert named == known - {"auto", "mine"}  # another test registers the last
