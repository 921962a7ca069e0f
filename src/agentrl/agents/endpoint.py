"""A small OpenAI-compatible endpoint in front of whatever samples; each rollout has its address."""

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentrl.agents.chain import Message
from agentrl.errors import InferenceError


@dataclass(frozen=True)
class Reply:
    """What the model said: text, and tool calls as (name, arguments in JSON)."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def message(self) -> Message:
        """The reply as a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{secrets.token_hex(8)}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in self.calls
            ]
        return message


Answer = Callable[[list[Message], list[dict[str, Any]]], Awaitable[Reply]]
"""Messages and tools to a reply."""


class Completions:
    """Serves `/s/SESSION/v1/chat/completions` on loopback."""

    def __init__(self) -> None:
        self._sessions: dict[str, Answer] = {}
        self._port = 0
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls) -> Self:
        """Listen on a free port.

        Raises:
            InferenceError: the server did not start.
        """
        self = cls()
        listening = socket.create_server(("127.0.0.1", 0))
        self._port = listening.getsockname()[1]
        app = Starlette(
            routes=[Route("/s/{session}/v1/chat/completions", self._complete, methods=["POST"])]
        )
        self._server = server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        )
        self._serving = asyncio.create_task(server.serve(sockets=[listening]))
        for _ in range(500):
            if server.started or self._serving.done():
                break
            await asyncio.sleep(0.01)
        if not server.started:
            raise InferenceError("the endpoint for agents did not start within 5 s")
        return self

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    @asynccontextmanager
    async def session(self, answer: Answer) -> AsyncIterator[str]:
        """Yield an address whose calls are answered by `answer`."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = answer
        try:
            yield f"http://127.0.0.1:{self._port}/s/{name}/v1"
        finally:
            del self._sessions[name]

    async def _complete(self, request: Request) -> JSONResponse:
        answer = self._sessions.get(request.path_params["session"])
        if answer is None:
            return _refused(404, "this rollout is over")
        body = await request.json()
        if body.get("stream"):
            return _refused(400, "streaming is not offered here; call with stream=False")
        messages = [_with_plain_text(message) for message in body["messages"]]
        reply = await answer(messages, body.get("tools") or [])
        return JSONResponse(
            {
                "id": f"chatcmpl-{secrets.token_hex(12)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.get("model"),
                "choices": [
                    {
                        "index": 0,
                        "message": reply.message,
                        "finish_reason": "tool_calls" if reply.calls else "stop",
                    }
                ],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            }
        )


def _with_plain_text(message: Message) -> Message:
    """Return a message whose text, if it came in parts, is one text: templates know no parts."""
    content = message.get("content")
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _refused(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "code": None}
    return JSONResponse({"error": error}, status_code=status)
