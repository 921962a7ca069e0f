"""An example MCP tool server: a small shop that knows prices and stock, and a calculator.

Run it over streamable HTTP (`--port`) or over stdio (`--stdio`):

    python examples/shop/server.py --host 127.0.0.1 --port 8765     # serves /mcp
    python examples/shop/server.py --stdio

The tools keep no state, so one server answers any number of rollouts. What a model gets wrong (an
unknown item, an argument of the wrong type) comes back as a tool result with `is_error` set, which
the model can read and react to; it never ends the session.
"""

import argparse
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)

DEFAULT_CATALOGUE = Path(__file__).resolve().parents[2] / "assets" / "demo" / "catalogue.json"
MAX_OPERAND = 10**12
"""Largest absolute value that the calculator accepts; keeps results short."""

Catalogue = Mapping[str, Mapping[str, int]]
"""Item name -> {"price": ..., "stock": ...}."""


class ToolInputError(Exception):
    """The tool cannot fulfil the model's request; the message is for the model."""


@dataclass(frozen=True)
class ToolShape:
    """Name, description and arguments (name -> JSON type) of one tool."""

    name: str
    description: str
    arguments: Mapping[str, str]

    @property
    def input_schema(self) -> dict[str, object]:
        """The arguments as a JSON Schema object; every argument is required."""
        return {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in self.arguments.items()},
            "required": list(self.arguments),
        }


_OPERANDS = {"a": "integer", "b": "integer"}
TOOLS: dict[str, ToolShape] = {
    shape.name: shape
    for shape in (
        ToolShape("price", "Price of a pack", {"item": "string"}),
        ToolShape("stock", "Packs in stock", {"item": "string"}),
        ToolShape("add", "a + b", _OPERANDS),
        ToolShape("subtract", "a - b", _OPERANDS),
        ToolShape("multiply", "a * b", _OPERANDS),
    )
}


def load_catalogue(path: Path) -> Catalogue:
    """Read a catalogue file: a JSON object of item name -> {"price", "stock"}."""
    catalogue: Catalogue = json.loads(path.read_text(encoding="utf-8"))
    return catalogue


def call_tool(catalogue: Catalogue, name: str, arguments: Mapping[str, object]) -> str:
    """Run one tool and return the text of its result.

    Raises:
        ToolInputError: the tool or the item is unknown, or the arguments do not fit the schema.
    """
    shape = TOOLS.get(name)
    if shape is None:
        raise ToolInputError(f"unknown tool {name!r}")
    if set(arguments) != set(shape.arguments):
        raise ToolInputError(f"{name} takes exactly: {', '.join(shape.arguments)}")
    if name in ("price", "stock"):
        return str(_look_up(catalogue, name, arguments["item"]))
    return str(_compute(name, _integer("a", arguments["a"]), _integer("b", arguments["b"])))


def _look_up(catalogue: Catalogue, field: str, item: object) -> int:
    if not isinstance(item, str):
        raise ToolInputError("item must be a string")
    if item not in catalogue:
        raise ToolInputError(f"unknown item {item!r}")
    return catalogue[item][field]


def _integer(name: str, value: object) -> int:
    # bool is an int to Python, but not to JSON
    if isinstance(value, bool) or not isinstance(value, int):
        raise ToolInputError(f"{name} must be an integer")
    if abs(value) > MAX_OPERAND:
        raise ToolInputError(f"{name} is too large")
    return value


def _compute(name: str, a: int, b: int) -> int:
    match name:
        case "add":
            return a + b
        case "subtract":
            return a - b
        case _:
            return a * b


def build_server(catalogue: Catalogue) -> Server:
    """Return an MCP server whose tools answer from the catalogue."""
    listing = ListToolsResult(
        tools=[
            Tool(name=shape.name, description=shape.description, input_schema=shape.input_schema)
            for shape in TOOLS.values()
        ]
    )

    async def on_list_tools(
        _ctx: object, _params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return listing

    async def on_call_tool(_ctx: object, params: CallToolRequestParams) -> CallToolResult:
        try:
            text, failed = call_tool(catalogue, params.name, params.arguments or {}), False
        except ToolInputError as error:
            text, failed = str(error), True
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=failed)

    return Server("shop", version="1.0", on_list_tools=on_list_tools, on_call_tool=on_call_tool)


async def serve_stdio(server: Server) -> None:
    """Serve one client over this process's stdin and stdout."""
    async with stdio_server() as (read_stream, write_stream):
        await server.run(read_stream, write_stream, server.create_initialization_options())


def serve_http(server: Server, host: str, port: int) -> None:
    """Serve any number of clients over streamable HTTP at `/mcp`, without sessions."""
    app = server.streamable_http_app(json_response=True, stateless_http=True, host=host)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


def main() -> None:
    """Parse the command line and serve until interrupted."""
    parser = argparse.ArgumentParser(description="MCP tool server of the demo shop")
    parser.add_argument("--catalogue", type=Path, default=DEFAULT_CATALOGUE, help="JSON file")
    parser.add_argument("--stdio", action="store_true", help="serve over stdin and stdout")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    # the SDK logs every request at INFO, which would cost more than the tools themselves
    logging.basicConfig(level=logging.WARNING)
    server = build_server(load_catalogue(args.catalogue))
    if args.stdio:
        anyio.run(serve_stdio, server)
    else:
        serve_http(server, args.host, args.port)


if __name__ == "__main__":
    main()
