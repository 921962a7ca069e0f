"""`OpenAIServer`: OpenAI's routes in front of rollouts.

Every rollout has an address of its own, `/s/<session>/v1`; `/v1` itself serves the rollout whose API
key a request carries.
"""

import asyncio
import hmac
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.config.checks import is_loopback
from agentrl.errors import ConfigError
from agentrl.inference.dialects.api_errors import Refusal
from agentrl.inference.dialects.chat_completions import ChatFrames, TextFrames, chat_body, text_body
from agentrl.inference.dialects.completion import Completion
from agentrl.inference.dialects.deltas import Listen
from agentrl.inference.dialects.pending_calls import streamed, whole
from agentrl.inference.dialects.requests import read_chat, read_completion
from agentrl.inference.dialects.responses_api import (
    ResponseFrames,
    as_chat,
    chat_messages,
    response_body,
)
from agentrl.inference.dialects.session import Session, session_over

SESSION_HEADER = "x-agentrl-session"
_BACKLOG = 1024
_GRACE_SECONDS = 1
_HALF_A_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")

_Handler = Callable[[Request, Session], Awaitable[Response]]


class OpenAIServer:
    """Serves the rollouts of a process; `open` is the usual way to one.

    Attributes:
        address: `http://host:port`.
    """

    def __init__(self, host: str, port: int) -> None:
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._sessions: dict[str, Session] = {}
        self._needs_key = not is_loopback(host)

    @classmethod
    @asynccontextmanager
    async def open(cls, host: str) -> AsyncIterator[Self]:
        """Listen on a free port until the context ends.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"--agent_gateway_host {host}: cannot listen there: {error.strerror or error}"
            ) from error
        server = cls(host, listener.getsockname()[1])
        serving = _Server(
            uvicorn.Config(
                server.app(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        task = asyncio.create_task(serving.serve(sockets=[listener]))
        try:
            yield server
        finally:
            serving.should_exit = True
            await task

    @asynccontextmanager
    async def serve(self, session: Session) -> AsyncIterator[None]:
        """Answer the calls of a rollout until the context ends."""
        self._sessions[session.id] = session
        try:
            yield
        finally:
            del self._sessions[session.id]
            await session.close()

    def base_url(self, session: Session) -> str:
        """Return a rollout's address, for OpenAI's clients."""
        return f"{self.address}/s/{session.id}/v1"

    def app(self) -> Starlette:
        """Return the application."""
        handlers: dict[str, tuple[_Handler, str]] = {
            "/models": (_models, "GET"),
            "/models/{model:path}": (_model, "GET"),
            "/chat/completions": (_chat, "POST"),
            "/completions": (_completion, "POST"),
            "/responses": (_response, "POST"),
        }
        routes = [Route("/health", _health, methods=["GET"])]
        routes += [
            Route(prefix + path, self._with_session(handler), methods=[method])
            for path, (handler, method) in handlers.items()
            for prefix in ("/v1", "/s/{session}/v1")
        ]
        return Starlette(
            routes=routes,
            exception_handlers={Refusal: _on_refusal, HTTPException: _on_http_exception},
        )

    def _with_session(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(http: Request) -> Response:
            return await handler(http, self._session_of(http))

        return handle

    def _session_of(self, http: Request) -> Session:
        """Return the rollout that a request belongs to.

        Raises:
            Refusal: there is none, or the key is another's.
        """
        named = http.path_params.get("session") or http.headers.get(SESSION_HEADER)
        _, _, key = http.headers.get("authorization", "").partition(" ")
        if named is None:
            found = next((s for s in self._sessions.values() if _same(key, s.key)), None)
            if found is None:
                raise Refusal(
                    "the API key is no rollout's; use the base_url or api_key that the agent was "
                    "given",
                    status=401,
                    code="invalid_api_key",
                )
            return found
        found = self._sessions.get(named)
        if found is None:
            raise session_over()
        if self._needs_key and not _same(key, found.key):
            raise Refusal("the API key is not this rollout's", status=401, code="invalid_api_key")
        return found


class _Server(uvicorn.Server):
    """Leaves the process's signals to the sampler."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _models(_: Request, session: Session) -> Response:
    cards = [_card(name) for name in session.models]
    return JSONResponse({"object": "list", "data": cards})


async def _model(http: Request, session: Session) -> Response:
    name = http.path_params["model"]
    if name not in session.models:
        raise Refusal(f"there is no model {name!r}", status=404, code="model_not_found")
    return JSONResponse(_card(name))


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "agentrl"}


async def _chat(http: Request, session: Session) -> Response:
    request = read_chat(await _json_object(http))
    call = partial(session.chat, request)
    if request.stream:
        return await streamed(http, session, call, ChatFrames(request))
    return JSONResponse(chat_body(await whole(http, session, call)))


async def _completion(http: Request, session: Session) -> Response:
    request = read_completion(await _json_object(http))
    call = partial(session.complete, request)
    if request.stream:
        return await streamed(http, session, call, TextFrames(request))
    return JSONResponse(text_body(await whole(http, session, call)))


async def _response(http: Request, session: Session) -> Response:
    body = await _json_object(http)
    chat = as_chat(body, session.messages_until(body.get("previous_response_id")))
    request = read_chat(chat)

    async def call(listen: Listen | None) -> Completion:
        completion = await session.chat(request, listen)
        session.keep_messages(f"resp_{completion.id}", chat_messages(chat, completion))
        return completion

    if request.stream:
        return await streamed(http, session, call, ResponseFrames(body, request))
    return JSONResponse(response_body(body, await whole(http, session, call)))


async def _json_object(http: Request) -> Mapping[str, Any]:
    raw = await http.body()
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise Refusal(f"the body has to be JSON: {error}") from None
    if _HALF_A_CHARACTER.search(raw):
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refusal(
                "the body holds half of a character (a lone \\ud800 to \\udfff), which is no text; "
                "leave it out"
            ) from None
    if not isinstance(body, dict):
        raise Refusal("the body has to be a JSON object")
    return body


def _same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())


async def _on_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error.response()


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Refusal(error.detail, status=error.status_code).response()
