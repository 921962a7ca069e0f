"""How an agent framework reaches an environment: addresses, headers and `.env` files."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dotenv import load_dotenv

from agentrl.errors import ConfigError

URL_VARIABLE = "MCP_SERVER_URL"
TOKEN_VARIABLE = "MCP_SERVER_TOKEN"
NAMES_VARIABLE = "MCP_SERVERS"
DEFAULT_URL = "http://127.0.0.1:8000/mcp"
"""Default address of `agentrl env up`."""
DEFAULT_NAME = "aworld-mcp"
DEFAULT_TIMEOUT_SECONDS = 600.0

_OPTIONS = (
    *("url", "authorization", "mcp_servers", "server_name", "type", "timeout"),
    *("sse_read_timeout", "client_session_timeout_seconds"),
)


def get_agent_tool_env_and_servers(
    url: str | None = None,
    mcp_server_list: str | Sequence[str] = "",
    tool_config: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the `mcpServers` mapping of an environment and its server names, in the agents' format.

    Without arguments the address is `MCP_SERVER_URL` and the token `MCP_SERVER_TOKEN`, as
    `agentrl env up` prints them; without the former, its default address. The servers are those
    that `MCP_SERVERS` names, or all.

    Args:
        url: address of the environment; precedes `tool_config["url"]` and `MCP_SERVER_URL`.
        mcp_server_list: the servers behind it that the agent sees, as a list or comma separated;
            empty means all. Precedes `tool_config["mcp_servers"]` and `MCP_SERVERS`.
        tool_config: any of `url`, `authorization` (the header's whole value), `mcp_servers`,
            `server_name` (`aworld-mcp`), `type` (`streamable-http`), and in seconds `timeout`,
            `sse_read_timeout`, `client_session_timeout_seconds` (600 each).

    Raises:
        ConfigError: an option is unknown.
    """
    options = dict(tool_config or {})
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ConfigError(
            f"tool_config: unknown option {unknown[0]!r}; one of {', '.join(_OPTIONS)}"
        )
    address = url or options.get("url") or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    server_names = (
        mcp_server_list or options.get("mcp_servers") or os.environ.get(NAMES_VARIABLE, "")
    )
    server: dict[str, Any] = {
        "type": options.get("type", "streamable-http"),
        "url": address,
        "headers": _headers(options.get("authorization"), server_names),
    }
    for limit in ("timeout", "sse_read_timeout", "client_session_timeout_seconds"):
        server[limit] = float(options.get(limit, DEFAULT_TIMEOUT_SECONDS))
    name = str(options.get("server_name", DEFAULT_NAME))
    return {"mcpServers": {name: server}}, [name]


def load_env_file(path: Path | None) -> None:
    """Set the variables of a `.env` file that are not set yet; `${OTHER}` is substituted.

    Args:
        path: the file; None means `.env` of this folder, if there is one.
    """
    if path is not None and not path.is_file():
        raise ConfigError(f"--env_file {path}: no such file")
    load_dotenv(path or Path(".env"), override=False, interpolate=True)


def _headers(authorization: str | None, servers: str | Sequence[str]) -> dict[str, str]:
    headers = {}
    token = os.environ.get(TOKEN_VARIABLE)
    if authorization:
        headers["Authorization"] = authorization
    elif token:
        headers["Authorization"] = f"Bearer {token.removeprefix('Bearer ')}"
    names = servers.split(",") if isinstance(servers, str) else servers
    joined = ",".join(name.strip() for name in names if name.strip())
    if joined:
        headers["MCP_SERVERS"] = joined
    return headers
