"""The legend of the maps that the vision demo asks about, as an MCP tool server.

    python examples/maps/server.py --port 8765     # serves /mcp

The tools do not see the maps: who asks has to name a colour. A colour that no map has comes back as
an error that the model can read.
"""

import argparse
import json
from pathlib import Path
from typing import TypedDict

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

DEFAULT_LEGEND = Path(__file__).resolve().parents[2] / "assets" / "demo" / "vision" / "legend.json"


class Meaning(TypedDict):
    """What a colour stands for."""

    land: str
    cost: int


Legend = dict[str, Meaning]
"""By the names of colours."""


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
    parser.add_argument("--legend", type=Path, default=DEFAULT_LEGEND, help="JSON file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    legend_server(json.loads(args.legend.read_text(encoding="utf-8"))).run(
        "streamable-http",
        host=args.host,
        port=args.port,
        stateless_http=True,
        json_response=True,
    )


if __name__ == "__main__":
    main()
