"""An MCP server that keeps state: `python counting_server.py FILE PORT`.

`advance` returns how often it was called in its session, `advance_all` how often anybody called it,
which is the size of the file.
"""

import sys
from collections import Counter
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("counting", log_level="CRITICAL")
steps: Counter[str] = Counter()


@server.tool()
def advance(context: Context) -> str:
    """Advance by one step."""
    session = (context.headers or {})["mcp-session-id"]
    steps[session] += 1
    return f"step {steps[session]}"


@server.tool()
def advance_all() -> str:
    """Advance everybody by one step."""
    with FILE.open("a") as file:
        file.write("x")
    return f"step {FILE.stat().st_size}"


if __name__ == "__main__":
    FILE = Path(sys.argv[1])
    server.run("streamable-http", port=int(sys.argv[2]))
