"""`agentrl env up`: the tools' environment for agents of this machine."""

import asyncio
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from pydantic import SecretStr

from agentrl.cli.arguments import Action, Asked, parse_action
from agentrl.errors import ConfigError

ACTIONS = {
    "up": Action(
        "Serve the MCP servers of --mcp_servers behind one address, each client with children of "
        "its own; prints the connection as JSON and serves until Ctrl-C. The token is "
        "MCP_SERVER_TOKEN, or a fresh one.",
        options=("host", "port", "env_file", "session_idle_seconds"),
    ),
}


def main(argv: Sequence[str]) -> int:
    """Serve an environment."""
    from agentrl.tools.agent_environment import load_env_file

    asked = parse_action("env", ACTIONS, argv)
    env_file = asked.options.get("env_file")
    load_env_file(None if env_file is None else Path(env_file))
    return asyncio.run(_up(asked))


async def _up(asked: Asked) -> int:
    from agentrl.runtime.ports import free_port
    from agentrl.tools import ToolsConfig, load_mcp_servers
    from agentrl.tools.agent_environment import TOKEN_VARIABLE, get_agent_tool_env_and_servers
    from agentrl.tools.environment import Environment, serve

    tools = asked.config.tools
    if tools.mcp_servers is None:
        raise ConfigError("`agentrl env up` needs --mcp_servers FILE (an mcpServers JSON file)")
    given = os.environ.get(TOKEN_VARIABLE)
    token = given or secrets.token_urlsafe(32)
    host = asked.options.get("host", "127.0.0.1")
    port = asked.number("port", 0) if "port" in asked.options else free_port(host, 8000)
    environment = Environment(
        ToolsConfig(
            servers=load_mcp_servers(tools.mcp_servers),
            call_timeout_seconds=tools.tool_timeout_seconds,
        ),
        token=SecretStr(token),
        session_idle_seconds=asked.number("session_idle_seconds", 1800),
    )
    connection, _ = get_agent_tool_env_and_servers(
        f"http://{_reachable(host)}:{port}/mcp",
        tool_config={
            # A token that the user set is not repeated on the screen.
            "authorization": f"Bearer ${{{TOKEN_VARIABLE}}}" if given else f"Bearer {token}"
        },
    )

    def say() -> None:
        print(json.dumps(connection, indent=2), flush=True)

    await serve(environment, host=host, port=port, when_ready=say)
    return 0


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "localhost") else host
