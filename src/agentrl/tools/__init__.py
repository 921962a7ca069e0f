"""Tools over MCP."""

from agentrl.tools.base import ToolBox, ToolSpec
from agentrl.tools.config import McpServer, ToolsConfig, load_mcp_servers
from agentrl.tools.mcp import McpToolBox, connect_tools, probe

__all__ = [
    "McpServer",
    "McpToolBox",
    "ToolBox",
    "ToolSpec",
    "ToolsConfig",
    "connect_tools",
    "load_mcp_servers",
    "probe",
]
