"""What the start says of where programs of tools write, and of machines that cannot confine them."""

import json
from pathlib import Path

import pytest

from agentrl.config.loading import load_config
from agentrl.errors import ConfigError
from agentrl.launcher.checks import preflight
from agentrl.launcher.checks.preflight import open_to_tools
from agentrl.tools import tool_walls

STDIO = json.dumps({"mcpServers": {"shop": {"command": "python", "args": ["shop.py"]}}})
HTTP = json.dumps({"mcpServers": {"shop": {"url": "http://127.0.0.1:1/mcp"}}})


@pytest.fixture
def gap(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (preflight, tool_walls):
        monkeypatch.setattr(module, "wall_gap", lambda: "unshare: not permitted")


@pytest.fixture
def walled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (preflight, tool_walls):
        monkeypatch.setattr(module, "wall_gap", lambda: None)


@pytest.mark.usefixtures("gap")
@pytest.mark.parametrize(
    "flags", [{"mcp_servers": STDIO}, {"tool_server_command": "python shop.py {port}"}]
)
def test_programs_that_cannot_be_confined_start_only_if_that_is_accepted(
    flags: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match=r"unshare: not permitted.*--allow_unconfined_tools"):
        open_to_tools(load_config(flags))
    (note,) = open_to_tools(load_config(flags | {"allow_unconfined_tools": "true"}))
    assert "see and change all that you can" in note
    assert "unshare: not permitted" in note


@pytest.mark.usefixtures("gap")
@pytest.mark.parametrize("flags", [{}, {"mcp_servers": HTTP}])
def test_nothing_is_said_where_agentrl_starts_no_program(flags: dict[str, str]) -> None:
    assert open_to_tools(load_config(flags)) == []


@pytest.mark.usefixtures("walled")
def test_a_run_whose_tools_write_nowhere_is_told_how_to_open_paths() -> None:
    note = "programs of tools write only to scratch folders of their own"
    expected = [f"{note} (--tool_writable_paths names more)"]
    assert open_to_tools(load_config({"mcp_servers": STDIO})) == expected


@pytest.mark.usefixtures("walled")
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
    places = "notes, /srv/shop, scratch folders of their own"
    assert open_to_tools(config) == [f"programs of tools write only to {places}"]
