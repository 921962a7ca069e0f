"""Tools over MCP."""

from agentrl.tools.agent_environment import get_agent_tool_env_and_servers
from agentrl.tools.base import ToolBox, ToolSpec
from agentrl.tools.config import McpServer, ToolsConfig
from agentrl.tools.mcp import McpToolBox, connect_tools, probe
from agentrl.tools.mcp_servers import load_mcp_servers

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
