"""An MCP server for the tests: `python mcp_server.py KIND COUNT_FILE [PORT]`.

KIND is stdio, stateless, stateful, sse, or liar: over stdio, with a tool that breaks its promise.

Over HTTP it prints its port once it accepts connections. `?fail=STATUS:N` in a client's URL makes
the first N tool calls of that URL fail with the status, before or (`after`) the tool has run.
"""

import os
import socket
import sys
from pathlib import Path
from urllib.parse import parse_qs

import anyio
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.stdio import stdio_server
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
    ToolAnnotations,
)
from starlette.types import ASGIApp, Receive, Scope, Send

COUNT_FILE = Path(sys.argv[2])
server = MCPServer("tests", log_level="CRITICAL")
notes: dict[str, list[str]] = {}
told: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool()
def fail(reason: str) -> str:
    raise ToolError(reason)


@server.tool()
def crash() -> str:
    raise RuntimeError("internals")


@server.tool()
async def slow(seconds: float) -> str:
    await anyio.sleep(seconds)
    return "done"


@server.tool()
async def steady(seconds: float, reports: int, context: Context) -> str:
    """Take `seconds` and report progress so many times on the way."""
    for number in range(reports):
        await anyio.sleep(seconds / reports)
        await context.report_progress(number + 1, reports)
    return "done"


@server.tool()
async def linger() -> str:
    """Wait for ever; leave a mark when the wait is called off."""
    COUNT_FILE.write_text("waiting")
    try:
        await anyio.sleep_forever()
    except anyio.get_cancelled_exc_class():
        COUNT_FILE.write_text("cancelled")
        raise
    return "never"


@server.tool()
def count() -> str:
    with COUNT_FILE.open("a") as file:
        file.write("x")
    return "counted"


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def count_idempotent() -> str:
    return count()


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def die_once() -> str:
    if COUNT_FILE.exists():
        return "alive"
    COUNT_FILE.touch()
    os._exit(1)


@server.tool()
def die() -> str:
    os._exit(1)


@server.tool()
def token(context: Context) -> str:
    return (context.headers or {}).get("authorization", "none")


@server.tool()
def header(name: str, context: Context) -> str:
    return (context.headers or {}).get(name, "none")


@server.tool()
def environment(name: str) -> str:
    return os.environ.get(name, "unset")


@server.tool()
def note(text: str, context: Context) -> str:
    mine = notes.setdefault((context.headers or {})["mcp-session-id"], [])
    mine.append(text)
    return " ".join(mine)


@server.tool()
def remember(text: str) -> str:
    """Return what this process was told so far."""
    told.append(text)
    return " ".join(told)


@server.tool(structured_output=False)
def mixed() -> CallToolResult:
    return CallToolResult(
        content=[
            TextContent(type="text", text="first"),
            ImageContent(type="image", data="QUJDRA==", mime_type="image/png"),
            AudioContent(type="audio", data="QUJDREU=", mime_type="audio/wav"),
            ResourceLink(type="resource_link", name="page", uri="https://example.org/page"),
            EmbeddedResource(
                type="resource", resource=TextResourceContents(uri="file:///a", text="inside")
            ),
            EmbeddedResource(
                type="resource",
                resource=BlobResourceContents(
                    uri="file:///b", blob="QUJD", mime_type="application/pdf"
                ),
            ),
        ]
    )


@server.tool(structured_output=False)
def structured() -> CallToolResult:
    return CallToolResult(content=[], structured_content={"price": 21, "name": "Lämpchen"})


@server.tool(structured_output=False)
def long(size: int) -> str:
    return "a" * size + "z"


class FailingCalls:
    """Fails the first calls of a URL that asks for it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.failed: dict[bytes, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = parse_qs(scope.get("query_string", b"").decode()).get("fail")
        headers = dict(scope.get("headers", []))
        if not wanted or headers.get(b"mcp-method", b"") != b"tools/call":
            return await self.app(scope, receive, send)
        status, times, *when = wanted[0].split(":")
        seen = self.failed.get(scope["query_string"], 0)
        if seen >= int(times):
            return await self.app(scope, receive, send)
        self.failed[scope["query_string"]] = seen + 1
        if when:

            async def swallow(message: object) -> None:
                pass

            await self.app(scope, receive, swallow)
        await send({"type": "http.response.start", "status": int(status), "headers": []})
        await send({"type": "http.response.body", "body": b"sorry"})
        return None


async def list_lies(*_: object) -> ListToolsResult:
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema = {"type": "object"}
    return ListToolsResult(tools=[Tool(name="lie", input_schema=schema, output_schema=number)])


async def tell_lie(*_: object) -> CallToolResult:
    return CallToolResult(content=[], structured_content={"n": "three"})


async def serve_lies() -> None:
    liar = Server("liar", on_list_tools=list_lies, on_call_tool=tell_lie)
    async with stdio_server() as (read_stream, write_stream):
        await liar.run(read_stream, write_stream, liar.create_initialization_options())


def main() -> None:
    if sys.argv[1] == "liar":
        anyio.run(serve_lies)
        return
    if sys.argv[1] == "stdio":
        server.run("stdio")
        return
    stateless = sys.argv[1] == "stateless"
    if sys.argv[1] == "sse":
        app = server.sse_app()
    else:
        app = server.streamable_http_app(stateless_http=stateless, json_response=stateless)
    listener = socket.create_server(("127.0.0.1", int(sys.argv[3]) if sys.argv[3:] else 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(FailingCalls(app), log_level="critical", lifespan="on")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
