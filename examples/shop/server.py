"""An example MCP tool server: a small shop that knows prices and stock, and a calculator.

Run it over streamable HTTP (`--port`) or over stdio (`--stdio`):

    python examples/shop/server.py --host 127.0.0.1 --port 8765     # serves /mcp
    python examples/shop/server.py --stdio

The tools keep no state, so one server answers any number of rollouts. What a model gets wrong (an
unknown item, an argument of the wrong type) comes back as a tool result with `is_error` set, which
the model can read and react to; it never ends the session.
"""

import argparse
import logging
from collections.abc import Mapping
from dataclasses import dataclass

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

MAX_OPERAND = 10**12
"""Largest absolute value that the calculator accepts; keeps results short."""

Catalogue = Mapping[str, Mapping[str, int]]
"""Item name -> {"price": ..., "stock": ...}."""
CATALOGUE: Catalogue = {
    "rice": {"price": 22, "stock": 15},
    "salt": {"price": 27, "stock": 34},
    "tea": {"price": 22, "stock": 16},
    "flour": {"price": 23, "stock": 28},
    "sugar": {"price": 29, "stock": 15},
    "honey": {"price": 23, "stock": 13},
    "coffee": {"price": 17, "stock": 39},
    "pepper": {"price": 11, "stock": 21},
    "corn": {"price": 17, "stock": 25},
    "oats": {"price": 12, "stock": 21},
    "pasta": {"price": 26, "stock": 42},
    "beans": {"price": 12, "stock": 35},
    "nuts": {"price": 24, "stock": 36},
    "figs": {"price": 26, "stock": 32},
    "dates": {"price": 22, "stock": 42},
    "plums": {"price": 10, "stock": 45},
    "grapes": {"price": 29, "stock": 20},
    "olives": {"price": 22, "stock": 13},
    "butter": {"price": 22, "stock": 10},
    "cheese": {"price": 29, "stock": 28},
    "milk": {"price": 16, "stock": 23},
    "cream": {"price": 27, "stock": 39},
    "jam": {"price": 26, "stock": 13},
    "bread": {"price": 25, "stock": 24},
    "soap": {"price": 20, "stock": 18},
    "candles": {"price": 18, "stock": 48},
    "paper": {"price": 28, "stock": 20},
    "ink": {"price": 20, "stock": 20},
    "glue": {"price": 16, "stock": 37},
    "tape": {"price": 27, "stock": 30},
    "nails": {"price": 10, "stock": 14},
    "screws": {"price": 20, "stock": 44},
    "wire": {"price": 29, "stock": 31},
    "rope": {"price": 18, "stock": 25},
    "paint": {"price": 29, "stock": 10},
    "chalk": {"price": 28, "stock": 48},
    "pens": {"price": 26, "stock": 15},
    "wool": {"price": 15, "stock": 39},
    "silk": {"price": 18, "stock": 39},
    "cotton": {"price": 28, "stock": 11},
}
"""What `examples.shop.questions.make_catalogue(0)` draws: a server that stands alone needs no file."""


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
    parser.add_argument("--stdio", action="store_true", help="serve over stdin and stdout")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    # the SDK logs every request at INFO, which would cost more than the tools themselves
    logging.basicConfig(level=logging.WARNING)
    server = build_server(CATALOGUE)
    if args.stdio:
        anyio.run(serve_stdio, server)
    else:
        serve_http(server, args.host, args.port)


if __name__ == "__main__":
    main()
