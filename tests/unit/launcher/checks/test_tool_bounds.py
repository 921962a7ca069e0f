"""What the start says of where programs of tools write, and of machines that cannot confine them."""

import json
from pathlib import Path

import pytest

from agentrl.config.loading import load_config
from agentrl.launcher.checks import tool_bounds
from agentrl.launcher.checks.tool_bounds import open_to_tools

STDIO = json.dumps({"mcpServers": {"shop": {"command": "python", "args": ["shop.py"]}}})
HTTP = json.dumps({"mcpServers": {"shop": {"url": "http://127.0.0.1:1/mcp"}}})


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_bounds, "confinement_gap", lambda: "unshare: not permitted")
    monkeypatch.setattr(tool_bounds, "open_ports_reason", lambda: "landlock: not implemented")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("confinement_gap", "open_ports_reason"):
        monkeypatch.setattr(tool_bounds, name, lambda: None)


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize(
    "flags", [{"mcp_servers": STDIO}, {"tool_server_command": "python shop.py {port}"}]
)
def test_what_stays_open_to_programs_of_tools_is_said(flags: dict[str, str]) -> None:
    files, ports = open_to_tools(load_config(flags))
    assert "see and change the files and processes of this user" in files
    assert "unshare: not permitted" in files
    assert "can connect to the run's database" in ports
    assert "landlock: not implemented" in ports


@pytest.mark.usefixtures("gaps")
@pytest.mark.parametrize("flags", [{}, {"mcp_servers": HTTP}])
def test_nothing_is_said_where_agentrl_starts_no_program(flags: dict[str, str]) -> None:
    assert open_to_tools(load_config(flags)) == []


@pytest.mark.usefixtures("closed")
def test_a_run_whose_tools_write_nowhere_is_told_how_to_open_paths() -> None:
    note = "programs of tools write only to scratch directories of their own"
    expected = [f"{note} (--tool_writable_paths names more)"]
    assert open_to_tools(load_config({"mcp_servers": STDIO})) == expected


@pytest.mark.usefixtures("closed")
def test_the_paths_that_tools_write_to_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    server = {"command": "python", "writable": ["/srv/shop"]}
    config = load_config(
        {
            "mcp_servers": json.dumps({"mcpServers": {"shop": server}}),
            "tool_writable_paths": "notes",
        }
    )
    places = f"{tmp_path / 'notes'}, /srv/shop, scratch directories of their own"
    assert open_to_tools(config) == [f"programs of tools write only to {places}"]
