import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from agentrl.errors import ConfigError
from agentrl.tools import ToolsConfig, load_mcp_servers
from agentrl.tools.servers.server_config import http_headers

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


def test_commands_in_messages_carry_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_KEY", "s3cret")
    server = load_mcp_servers(
        {
            "shop": {
                "command": "npx",
                "args": ["-y", "shop", "${SHOP_KEY}", "--api-key", "s3cret", "--TOKEN=s3cret", "x"],
            },
            "path": {"url": "https://example.org/${env:SHOP_KEY}/mcp"},
        }
    )
    assert server["shop"].address == "npx -y shop ${SHOP_KEY} --api-key *** --TOKEN=*** x"
    assert server["shop"].args[2] == "s3cret"
    assert server["path"].address == "https://example.org/${env:SHOP_KEY}/mcp"
    assert server["path"].url == "https://example.org/s3cret/mcp"


def test_files_of_other_clients_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    servers = {
        "cline": {
            "command": "npx",
            "args": ["-y", "files"],
            "disabled": False,
            "autoApprove": ["read"],
            "alwaysAllow": [],
        },
        "off": {"command": "npx", "disabled": True},
        "windsurf": {"serverUrl": "http://example.org/mcp"},
        "gemini": {"httpUrl": "http://example.org/mcp", "trust": True, "description": "x"},
        "code": {"type": "stdio", "command": "uvx", "env": {"A": "1"}, "cwd": "/"},
    }
    path.write_text(json.dumps({"servers": servers, "inputs": []}), encoding="utf-8-sig")
    read = load_mcp_servers(path)
    assert {name: server.transport for name, server in read.items()} == {
        "cline": "stdio",
        "windsurf": "http",
        "gemini": "http",
        "code": "stdio",
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{", "mcpServers: not JSON"),
        ("{}", "non-empty object"),
        ('{"mcpServers": []}', "non-empty object"),
        ({"a": 3}, r"mcpServers\.a: expected an object"),
        ({"a": {}}, r"mcpServers\.a: a http server takes `url`"),
        ({"a": {"command": "y", "args": ["${rollout_dir}/x"]}}, 'requires "per_rollout": true'),
        ({"a": {"command": "y", "state": "folder"}}, '"state": "folder" requires a command with'),
        (
            {"a": {"url": "http://x/mcp", "per_rollout": True, "state": "folder"}},
            '"state": "folder" requires a command with "per_rollout": true',
        ),
        (
            {"a": {"url": "http://x/${rollout_dir}"}},
            "is supported only in args, env and cwd of a command",
        ),
        (
            {"a": {"url": "http://x/mcpapi", "per_rollout": True}},
            "per_rollout is not supported by aggregators",
        ),
        ({"a": {"url": "example.org"}}, r"mcpServers\.a: url 'example.org' is not an http"),
        ({"a": {"url": "http://x", "command": "y"}}, "a stdio server takes `command`, not `url`"),
        (
            {"a": {"command": "y", "perRollout": True}},
            r"perRollout: unknown setting; did you mean per_rollout\? \(known: tr",
        ),
        (
            {"a": {"url": "http://x", "colour": 1}},
            r"mcpServers\.a\.colour: unknown setting \(known: tr",
        ),
        ({"a": {"url": "http://x", "type": "carrier pigeon"}}, "unknown transport"),
        ({"a": {"url": "http://x", "disabled": True}}, "all servers are disabled"),
        (
            {"a": {"url": "http://x/${input:key}"}},
            r"\$\{input:key\} is a variable of another client",
        ),
        ({"a": {"url": "http://x/${N0_SUCH}"}}, "the environment variable N0_SUCH is not set"),
        ({"a": {"url": "http://x", "timeout": -1}}, r"mcpServers\.a\.call_timeout_seconds"),
    ],
)
def test_malformed_servers_are_named(source: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_mcp_servers(source)  # type: ignore[arg-type]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json"):
        load_mcp_servers(tmp_path / "absent.json")


def test_a_servers_own_authorization_is_the_only_one_sent() -> None:
    servers = load_mcp_servers(
        {
            "own": {"url": "http://x", "headers": {"authorization": "Basic x"}},
            "other": {"url": "http://y", "headers": {"MCP_SERVERS": "a"}},
        }
    )
    config = ToolsConfig(servers=servers, auth_token=SecretStr("t"))
    plain = {"Accept-Encoding": "identity"}
    assert http_headers(servers["own"], config) == {"authorization": "Basic x"} | plain
    assert http_headers(servers["other"], config) == {
        "MCP_SERVERS": "a",
        "Authorization": "Bearer t",
        **plain,
    }


def test_unknown_server_names_are_refused() -> None:
    config = ToolsConfig(servers=load_mcp_servers(MAPPING), server_names=("wbe",))
    expected = r"unknown MCP server 'wbe'; did you mean 'web'\? \(known: files, old, web\)"
    with pytest.raises(ConfigError, match=expected):
        _ = config.selected
