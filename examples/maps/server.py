"""The legend of the maps that the vision demo asks about, as an MCP tool server.

    python examples/maps/server.py --port 8765     # serves /mcp

The tools do not see the maps: who asks has to name a colour. A colour that no map has comes back as
an error that the model can read.
"""

import argparse
from typing import TypedDict

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError


class Meaning(TypedDict):
    """What a colour stands for."""

    land: str
    cost: int


Legend = dict[str, Meaning]
"""By the names of colours."""
LEGEND: Legend = {
    "red": {"land": "island", "cost": 7},
    "orange": {"land": "valley", "cost": 8},
    "yellow": {"land": "heath", "cost": 2},
    "green": {"land": "glacier", "cost": 4},
    "blue": {"land": "forest", "cost": 3},
    "purple": {"land": "orchard", "cost": 9},
    "black": {"land": "meadow", "cost": 6},
    "white": {"land": "swamp", "cost": 5},
}
"""What the seed 0 draws: a server that stands alone needs no file."""


def legend_server(legend: Legend) -> MCPServer:
    """Return a stateless server for a legend."""
    server = MCPServer("legend", log_level="WARNING")

    def look_up(colour: str) -> Meaning:
        if colour not in legend:
            raise ToolError(f"the legend has no {colour!r}, only {', '.join(legend)}")
        return legend[colour]

    @server.tool(description="Land of a colour")
    def land(colour: str) -> str:
        return look_up(colour)["land"]

    @server.tool(description="Cost to cross a colour")
    def cost(colour: str) -> int:
        return look_up(colour)["cost"]

    return server


def main() -> None:
    """Parse the command line and serve until interrupted."""
    parser = argparse.ArgumentParser(description="MCP server of the legend of maps")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    legend_server(LEGEND).run(
        "streamable-http",
        host=args.host,
        port=args.port,
        stateless_http=True,
        json_response=True,
    )


if __name__ == "__main__":
    main()
