"""An MCP server with one tool, `slow(seconds)`, that logs every call at its start.

python slow_tool.py LOG_FILE PORT
"""

import sys
from pathlib import Path

import anyio
from mcp.server import MCPServer

server = MCPServer("slow", log_level="ERROR")
LOG_FILE = Path(sys.argv[1])


@server.tool()
async def slow(seconds: float) -> str:
    """Return after `seconds`."""
    async with await anyio.open_file(LOG_FILE, "a") as log:
        await log.write(f"slow {seconds}\n")
    await anyio.sleep(seconds)
    return "done"


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
