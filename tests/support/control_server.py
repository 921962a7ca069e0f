"""A server whose answers to control routes a test decides, on a real socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.patience import PATIENCE

Answer = Callable[[dict[str, Any]], Awaitable[Response] | Response]


class ControlServer:
    """Answers control routes with success, unless a test put another answer in `answers`."""

    def __init__(self, version: str = "0.5.23") -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.keys: dict[str, set[str | None]] = {}
        """What came in the header `Authorization`, by route."""
        self.answers: dict[str, Answer] = {}
        self.info = {"version": version, "enable_memory_saver": True}
        self.base_url = ""

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    async def handle(self, request: Request) -> Response:
        name = request.url.path.lstrip("/")
        self.keys.setdefault(name, set()).add(request.headers.get("Authorization"))
        if name == "server_info":
            return JSONResponse(self.info)
        body = await request.json() if await request.body() else {}
        self.calls.append((name, body))
        answer = self.answers.get(name)
        if answer is None:
            return JSONResponse({"success": True, "message": "ok"})
        result = answer(body)
        return await result if isinstance(result, Awaitable) else result


@contextlib.asynccontextmanager
async def serve(version: str = "0.5.23") -> AsyncIterator[ControlServer]:
    control = ControlServer(version)
    app = Starlette(routes=[Route("/{path:path}", control.handle, methods=["GET", "POST"])])
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=0)
    )
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(PATIENCE):
        while not server.started:
            await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    control.base_url = f"http://127.0.0.1:{port}"
    try:
        yield control
    finally:
        server.should_exit = True
        await serving


def refuse(status: int, message: str) -> Answer:
    return lambda _: JSONResponse({"success": False, "message": message}, status_code=status)
