"""An MCP server whose state is a file: `python folder_server.py FOLDER NOISE`.

`advance` appends a line to the file `steps` and returns how many there are; with NOISE `noisy`, each
result also has a random number.
"""

import random
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("folder", log_level="CRITICAL")


@server.tool()
def advance() -> str:
    """Advance by one step."""
    with FILE.open("a") as file:
        file.write("x\n")
    noise = f" ({random.random()})" if sys.argv[2] == "noisy" else ""
    return f"step {len(FILE.read_text().split())}{noise}"


if __name__ == "__main__":
    FILE = Path(sys.argv[1]) / "steps"
    server.run("stdio")
