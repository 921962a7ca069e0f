"""The tool server of this project: every function under `@server.tool()` is a tool of the model.

`agentrl run` starts it as config.yaml says: `python tools.py PORT` serves MCP over HTTP.
"""

import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

STOCK = {"honey": 13, "candles": 48, "corn": 25, "silk": 39, "rice": 15}
"""Packs in stock."""

server = MCPServer("stock", log_level="WARNING")


@server.tool(description="Packs in stock")
def stock(item: str) -> int:
    """Look an item up. The model reads the text of a ToolError; other exceptions are only logged."""
    if item not in STOCK:
        raise ToolError(f"there is no {item!r}")
    return STOCK[item]


@server.tool(description="a + b")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    # Stateless: one server answers any number of rollouts.
    server.run("streamable-http", port=int(sys.argv[1]), stateless_http=True, json_response=True)
