import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.doc_blocks import write_blocks

from agentrl.errors import ConfigError
from agentrl.tools import get_agent_tool_env_and_servers, load_mcp_servers
from agentrl.tools.agent_environment import load_env_file


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MCP_SERVER_URL", "MCP_SERVER_TOKEN", "MCP_SERVERS"):
        monkeypatch.delenv(name, raising=False)


def test_without_arguments_the_environment_variables_say_where_the_tools_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MCP_SERVER_URL", "http://127.0.0.1:8000/mcp")
    monkeypatch.setenv("MCP_SERVER_TOKEN", "s3cret")
    config, names = get_agent_tool_env_and_servers()
    assert names == ["aworld-mcp"]
    assert config == {
        "mcpServers": {
            "aworld-mcp": {
                "type": "streamable-http",
                "url": "http://127.0.0.1:8000/mcp",
                "headers": {"Authorization": "Bearer s3cret"},
                "timeout": 600.0,
                "sse_read_timeout": 600.0,
                "client_session_timeout_seconds": 600.0,
            }
        }
    }


def test_every_option_is_followed() -> None:
    options: dict[str, Any] = {
        "url": "http://ignored/mcp",
        "authorization": "Token abc",
        "mcp_servers": "ignored",
        "server_name": "mine",
        "type": "sse",
        "timeout": 1,
        "sse_read_timeout": 2,
        "client_session_timeout_seconds": 6000,
    }
    config, names = get_agent_tool_env_and_servers(
        "http://gpu-7:8000/mcp", ["browser", " wiki"], options
    )
    assert names == ["mine"]
    assert config["mcpServers"]["mine"] == {
        "type": "sse",
        "url": "http://gpu-7:8000/mcp",
        "headers": {"Authorization": "Token abc", "MCP_SERVERS": "browser,wiki"},
        "timeout": 1.0,
        "sse_read_timeout": 2.0,
        "client_session_timeout_seconds": 6000.0,
    }
    assert load_mcp_servers(json.dumps(config))["mine"].call_timeout_seconds == 6000


def test_without_any_variable_the_tools_are_where_env_up_serves_them() -> None:
    config, names = get_agent_tool_env_and_servers()
    server = config["mcpServers"][names[0]]
    assert (server["url"], server["headers"]) == ("http://127.0.0.1:8000/mcp", {})


def test_a_variable_names_the_servers_unless_an_argument_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named(*arguments: Any) -> str:
        config, names = get_agent_tool_env_and_servers(*arguments)
        return str(config["mcpServers"][names[0]]["headers"]["MCP_SERVERS"])

    monkeypatch.setenv("MCP_SERVERS", "readweb-server, wiki-server")
    assert named() == "readweb-server,wiki-server"
    assert named(None, "search") == "search"
    assert named(None, "", {"mcp_servers": ["browser"]}) == "browser"


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown option 'token'"):
        get_agent_tool_env_and_servers(tool_config={"token": "x"})


def test_a_dotenv_file_fills_one_variable_in_from_another_and_overrides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "CODE_LLM_API_KEY": "set before"})
    path = tmp_path / ".env"
    path.write_text(
        "MCP_LLM_BASE_URL=http://judge:8000/v1\n"
        "CODE_LLM_BASE_URL=${MCP_LLM_BASE_URL}\n"
        "CODE_LLM_API_KEY=from the file\n"
        "THINK_LLM_MODEL_NAME=${NOT_SET:-fallback}\n"
    )
    load_env_file(path)
    assert os.environ["CODE_LLM_BASE_URL"] == "http://judge:8000/v1"
    assert os.environ["THINK_LLM_MODEL_NAME"] == "fallback"
    assert os.environ["CODE_LLM_API_KEY"] == "set before"


def test_the_page_about_environments_is_true(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_blocks("tools.md", tmp_path)
    monkeypatch.setenv("TAVILY_API_KEY", "key")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    exec(compile((tmp_path / "connect.py").read_text(), "connect.py", "exec"), {})
    assert set(load_mcp_servers(tmp_path / "children.json")) == {"browser", "search", "wiki"}
