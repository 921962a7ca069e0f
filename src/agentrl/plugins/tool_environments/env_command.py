"""`agentrl env up`."""

import json
import os
import secrets
from pathlib import Path

import click
from pydantic import SecretStr

from agentrl.config.command_line import Count, FlagGroup
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError


@click.group("env", cls=FlagGroup, sections=("tools",))
def env() -> None:
    """Serve tools to agents on this machine."""


@env.command("up")
@click.option("--host", default="127.0.0.1", help="Address to listen on. [127.0.0.1]")
@click.option(
    "--port", type=Count(most=65535), help="Port to listen on; a free one from 8000 by default."
)
@click.option(
    "--env_file",
    metavar="PATH",
    type=Path,
    help="File of environment variables; `.env` by default.",
)
@click.option(
    "--session_idle_seconds",
    type=Count(),
    default=1800,
    help="Seconds without a call after which a client's servers are stopped. [1800]",
)
@click.option(
    "--max_sessions",
    type=Count(),
    default=64,
    help="Maximum number of clients with servers at the same time. [64]",
)
@click.option(
    "--server_memory_megabytes",
    type=Count(),
    default=4096,
    help="Memory of each of a client's servers; one that exceeds it is stopped. [4096]",
)
async def env_up(
    config: RootConfig,
    host: str,
    port: int | None,
    env_file: Path | None,
    session_idle_seconds: int,
    max_sessions: int,
    server_memory_megabytes: int,
) -> int:
    """Serve the MCP servers of --mcp_servers behind one address until Ctrl-C.

    Every client gets its own server processes, isolated from one another and from the environment
    variables of this process. Prints the connection as JSON. The token is MCP_SERVER_TOKEN, or a
    new one.
    """
    from agentrl.addresses import http_address
    from agentrl.plugins.tool_environments.environment import Environment, serve
    from agentrl.rollout.worker.resources import tools_of
    from agentrl.runtime.logs import setup_logging
    from agentrl.runtime.ports import listening, listening_near
    from agentrl.tools.agent_environment import (
        TOKEN_VARIABLE,
        get_agent_tool_env_and_servers,
        load_env_file,
    )

    setup_logging("environment")
    load_env_file(env_file)
    if config.tools.mcp_servers is None:
        raise ConfigError("`agentrl env up` needs --mcp_servers FILE (an mcpServers JSON file)")
    given = os.environ.get(TOKEN_VARIABLE)
    token = given or secrets.token_urlsafe(32)
    tools = tools_of(config)
    environment = Environment(
        tools.model_copy(update={"log_dir": config.run.logs_dir, "log_prefix": "env_"}),
        token=SecretStr(token),
        session_idle_seconds=session_idle_seconds,
        max_sessions=max_sessions,
        server_memory_bytes=server_memory_megabytes << 20,
    )
    reachable = "127.0.0.1" if host in ("0.0.0.0", "localhost") else host
    with listening_near(host, 8000) if port is None else listening(host, port) as listener:
        connection, _ = get_agent_tool_env_and_servers(
            f"{http_address(reachable, listener.getsockname()[1])}/mcp",
            tool_config={
                # A token that the user set is not repeated on the screen.
                "authorization": f"Bearer ${{{TOKEN_VARIABLE}}}" if given else f"Bearer {token}"
            },
        )

        def print_connection() -> None:
            print(json.dumps(connection, indent=2), flush=True)

        await serve(environment, listener, host=host, when_ready=print_connection)
    return 0
