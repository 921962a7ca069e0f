"""Tools over MCP, and the environment that serves them. The only door to MCP."""

from agentrl.tools.agent_environment import get_agent_tool_env_and_servers
from agentrl.tools.mcp_toolbox import McpToolBox, connect_tools, probe
from agentrl.tools.servers.server_config import McpServer, ToolsConfig, load_mcp_servers
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
