"""Tools over MCP, and the environment that serves them. The only door to MCP."""

from typing import TYPE_CHECKING, Any

from agentrl.tools.agent_environment import get_agent_tool_env_and_servers
from agentrl.tools.servers.server_config import McpServer, ToolsConfig, load_mcp_servers

if TYPE_CHECKING:
    from agentrl.tools.mcp_toolbox import McpToolBox, connect_tools, probe
    from agentrl.tools.tool_specs import ToolBox, ToolSpec

__all__ = [
    "McpServer",
    "McpToolBox",
    "ToolBox",
    "ToolSpec",
    "ToolsConfig",
    "connect_tools",
    "get_agent_tool_env_and_servers",
    "load_mcp_servers",
    "probe",
]


def __getattr__(name: str) -> Any:
    """Import what talks to servers when it is asked for.

    The environment of an agent framework may have an older `mcp`, or none.
    """
    if name in ("McpToolBox", "connect_tools", "probe"):
        from agentrl.tools import mcp_toolbox  # noqa: PLC0415

        return getattr(mcp_toolbox, name)
    if name in ("ToolBox", "ToolSpec"):
        from agentrl.tools import tool_specs  # noqa: PLC0415

        return getattr(tool_specs, name)
    raise AttributeError(f"module 'agentrl.tools' has no attribute {name!r}")
