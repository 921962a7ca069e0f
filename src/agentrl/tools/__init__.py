"""Tools over MCP."""

from agentrl.tools.agent_environment import get_agent_tool_env_and_servers
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
    "get_agent_tool_env_and_servers",
    "load_mcp_servers",
    "probe",
]
