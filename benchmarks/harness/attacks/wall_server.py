"""Serves `wall_attacks.attempts` as a tool: `python wall_server.py`, or `python wall_server.py PORT`."""

import json
import sys

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
from wall_attacks import attempts  # type: ignore[import-not-found]  # beside this file

SCHEMA = {"type": "object", "properties": {"given": {"type": "string"}}, "required": ["given"]}


async def list_tools(_context: object, _params: PaginatedRequestParams | None) -> ListToolsResult:
    """Return the one tool."""
    return ListToolsResult(tools=[Tool(name="attack", description="Tries.", input_schema=SCHEMA)])


async def call_tool(_context: object, params: CallToolRequestParams) -> CallToolResult:
    """Return what succeeded."""
    given = json.loads((params.arguments or {})["given"])
    found = await anyio.to_thread.run_sync(attempts, given)
    return CallToolResult(content=[TextContent(type="text", text=json.dumps(found))])


async def serve_over_pipes(server: Server) -> None:
    """Serve over standard input and output."""
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    attacking = Server("attack", version="1", on_list_tools=list_tools, on_call_tool=call_tool)
    if len(sys.argv) > 1:
        app = attacking.streamable_http_app(
            json_response=True, stateless_http=True, host="127.0.0.1"
        )
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
    else:
        anyio.run(serve_over_pipes, attacking)
