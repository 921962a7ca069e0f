"""A server whose answers a test decides, on a real socket, in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Answer = Callable[[dict[str, Any]], Awaitable[Response]]


@dataclass
class StubServer:
    """What was asked and who answers."""

    answer: Answer
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of `/generate`, in order."""


@asynccontextmanager
async def stub_server(answer: Answer) -> AsyncIterator[StubServer]:
    """Serve `/generate` with the given answers."""
    stub = StubServer(answer)

    async def generate(request: Request) -> Response:
        stub.bodies.append(await request.json())
        return await stub.answer(stub.bodies[-1])

    app = Starlette(routes=[Route("/generate", generate, methods=["POST"])])
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        stub.url = f"http://127.0.0.1:{port}"
        yield stub
    finally:
        server.should_exit = True
        await running


def generation(
    ids: list[int], kind: str = "stop", version: str = "0", **meta: Any
) -> dict[str, Any]:
    """Return a body as `/generate` answers it."""
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": kind},
            "prompt_tokens": 3,
            "cached_tokens": 1,
            "num_retractions": 0,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.5 - token, token, None] for token in ids],
            **meta,
        },
    }
