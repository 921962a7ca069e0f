"""An MCP server that needs more of its client than calls: `python asking_server.py PORT`.

`order` asks the user, `think` needs a language model, and `find` asks for roots, without asking
whether there are any; `grow` adds a tool; `report` says more in its structured content than in its
text; `look_up` answers with a link. It gives instructions.
"""

import itertools
import sys
from contextlib import suppress
from typing import Annotated

import uvicorn
from mcp.server.elicitation import ElicitationResult
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.resolve import Elicit, Resolve, Sample
from mcp.types import (
    CallToolResult,
    CreateMessageResult,
    InputRequiredResult,
    ListRootsRequest,
    ListRootsResult,
    ResourceLink,
    SamplingMessage,
    TextContent,
)
from pydantic import BaseModel

INSTRUCTIONS = "Prices are in euro."
NUM_REGROWN = 900


class Color(BaseModel):
    """A form whose field has a default."""

    color: str = "red"


numbers = itertools.count()
server = MCPServer("asking", instructions=INSTRUCTIONS, log_level="CRITICAL")


def ask_color() -> Elicit[Color]:
    return Elicit("Which color?", Color)


def ask_model() -> Sample:
    said = TextContent(type="text", text="Why?")
    return Sample([SamplingMessage(role="user", content=said)], max_tokens=9)


@server.tool()
def order(answer: Annotated[ElicitationResult[Color], Resolve(ask_color)]) -> str:
    return str(answer)


@server.tool()
def think(thought: Annotated[CreateMessageResult, Resolve(ask_model)]) -> str:
    return str(thought)


@server.tool(structured_output=False)
async def find(context: Context) -> CallToolResult | InputRequiredResult:
    if context.request_context.protocol_version >= "2026":
        return InputRequiredResult(input_requests={"roots": ListRootsRequest()})
    await context.session.send_request(ListRootsRequest(), ListRootsResult)
    return CallToolResult(content=[])


@server.tool()
async def grow(context: Context) -> str:
    """Add a tool and tell so, as either generation does."""

    def shrink(size: int) -> int:
        """Make it smaller."""
        return size - 1

    server.add_tool(shrink, name=f"shrink_{next(numbers)}")
    await context.notify_tools_changed()
    if context.request_context.protocol_version < "2026":
        await context.session.send_tool_list_changed()
    return "grown"


@server.tool()
async def regrow(context: Context) -> str:
    """Put 900 new tools in place of those before."""
    first = next(numbers) * NUM_REGROWN
    for number in range(first, first + NUM_REGROWN):
        if number >= NUM_REGROWN and first:
            with suppress(ToolError):
                server.remove_tool(f"again_{number - NUM_REGROWN}")
        server.add_tool(report, name=f"again_{number}")
    await context.notify_tools_changed()
    if context.request_context.protocol_version < "2026":
        await context.session.send_tool_list_changed()
    return "grown again"


@server.tool(structured_output=False)
def report() -> CallToolResult:
    return CallToolResult(
        content=[TextContent(type="text", text="2 lamps")], structured_content={"price": 21}
    )


@server.tool(structured_output=False)
def look_up() -> CallToolResult:
    link = ResourceLink(type="resource_link", name="page", uri="shop://lamps")
    lost = ResourceLink(type="resource_link", name="lost", uri="shop://none")
    return CallToolResult(content=[link, lost])


@server.resource("shop://lamps")
def lamps() -> str:
    return "The lamp costs 21."


if __name__ == "__main__":
    app = server.streamable_http_app()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
