import json
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.tools import ToolsConfig, load_mcp_servers

MAPPING = {
    "web": {"url": "https://example.org/mcp", "headers": {"X-Key": "k3y"}, "timeout": 30},
    "files": {"command": "uvx", "args": ["files", "--root", "/"], "env": {"TOKEN": "t0ken"}},
    "old": {"type": "sse", "url": "http://example.org/sse"},
}


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("form", ["mapping", "text", "file"])
def test_mcp_servers_are_read_in_every_form(tmp_path: Path, form: str, wrapped: bool) -> None:
    mapping: dict[str, object] = {"mcpServers": MAPPING} if wrapped else dict(MAPPING)
    path = tmp_path / "servers.json"
    path.write_text(json.dumps(mapping))
    sources = {"mapping": mapping, "text": json.dumps(mapping), "file": path}
    servers = load_mcp_servers(sources[form])  # type: ignore[arg-type]
    assert [(name, server.transport) for name, server in servers.items()] == [
        ("web", "http"),
        ("files", "stdio"),
        ("old", "sse"),
    ]
    assert servers["web"].call_timeout_seconds == 30
    assert servers["files"].address == "uvx files --root /"
    assert "k3y" not in repr(servers)
    assert "t0ken" not in repr(servers)


def test_an_address_alone_is_one_server() -> None:
    servers = load_mcp_servers("http://127.0.0.1:8000/mcp")
    assert servers["default"].url == "http://127.0.0.1:8000/mcp"


def test_addresses_in_messages_carry_no_secrets() -> None:
    server = load_mcp_servers("https://user:pw@example.org/mcp?key=secret")["default"]
    assert server.address == "https://example.org/mcp"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{", "mcpServers: not JSON"),
        ("{}", "non-empty object"),
        ('{"mcpServers": []}', "non-empty object"),
        ({"a": 3}, r"mcpServers\.a: expected an object"),
        ({"a": {}}, r"mcpServers\.a: a http server needs `url`"),
        ({"a": {"url": "example.org"}}, r"mcpServers\.a: url 'example.org' is not an http"),
        ({"a": {"url": "http://x", "command": "y"}}, "a stdio server needs `command` and no `url`"),
        ({"a": {"url": "http://x", "colour": 1}}, r"mcpServers\.a\.colour: Extra inputs"),
        ({"a": {"url": "http://x", "type": "carrier pigeon"}}, "unknown transport"),
        ({"a": {"url": "http://x", "timeout": -1}}, r"mcpServers\.a\.call_timeout_seconds"),
    ],
)
def test_malformed_servers_are_named(source: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_mcp_servers(source)  # type: ignore[arg-type]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json"):
        load_mcp_servers(tmp_path / "absent.json")


def test_unknown_server_names_are_refused() -> None:
    config = ToolsConfig(servers=load_mcp_servers(MAPPING), server_names=("wbe",))
    expected = r"unknown MCP server 'wbe'; did you mean 'web'\? \(known: files, old, web\)"
    with pytest.raises(ConfigError, match=expected):
        _ = config.selected
