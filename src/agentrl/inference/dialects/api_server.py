"""`APIServer`: the HTTP server through which clients call the models of rollouts.

Every rollout has its own address, `/s/<session>/v1`, and its own API key, which every call carries;
`/v1` itself serves the rollout whose key that is.
"""

import asyncio
import hmac
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.addresses import family_of, http_address
from agentrl.errors import APIError, ConfigError
from agentrl.inference import openapi
from agentrl.inference.dialects import (
    anthropic_messages,
    chat_completions,
    responses,
    text_completions,
    token_generation,
)
from agentrl.inference.dialects.dialect import Dialect, answer, bearer_key
from agentrl.inference.dialects.openai_common import error_body
from agentrl.inference.dialects.session import ModelSession, session_over
from agentrl.inference.request_bodies import read_json_object
from agentrl.runtime.http.http_guard import HttpGuard
from agentrl.runtime.http.http_servers import server_config
from agentrl.schema.agent_endpoint import AgentEndpoint

DIALECTS = (
    chat_completions.DIALECT,
    text_completions.DIALECT,
    token_generation.DIALECT,
    responses.DIALECT,
    anthropic_messages.DIALECT,
    anthropic_messages.TOKEN_COUNTS,
)
"""The protocols that are served; to add one, write a module and add it here."""
SESSION_HEADER = "x-agentrl-session"
SEAT_HEADER, STINT_HEADER = "x-agentrl-seat", "x-session-id"
"""Which agent calls, in a rollout of several, and in which of its stints. Names are percent-encoded."""
_BACKLOG = 1024
_GRACE_SECONDS = 1
_SCHEMA_FIELDS = frozenset({"response_format", "text", "output_config"})
"""Request fields with a JSON schema. Checking it is slow, so such requests are read in a thread."""
_MAX_BODY_BYTES = 64 << 20
"""Large, because every call sends the whole conversation, with images in base64."""

_Handler = Callable[[Request], Awaitable[Response]]


class APIServer:
    """Serves the sessions of a process; usually created by `open`.

    Attributes:
        address: `http://host:port`.
    """

    def __init__(self, host: str, port: int) -> None:
        self.address = http_address(host, port)
        self._sessions: dict[str, ModelSession] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, host: str) -> AsyncIterator[Self]:
        """Listen on a free port until the context ends."""
        try:
            listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"agent_gateway_host {host}: cannot listen there: {error.strerror or error}"
            ) from error
        server = cls(host, listener.getsockname()[1])
        uvicorn_server = _Server(
            server_config(HttpGuard(server.app(), host), grace_seconds=_GRACE_SECONDS)
        )
        task = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
        try:
            yield server
        finally:
            uvicorn_server.should_exit = True
            await task

    @asynccontextmanager
    async def serve(self, session: ModelSession) -> AsyncIterator[AgentEndpoint]:
        """Answer the calls of a rollout until the context ends; yields the endpoint to call."""
        self._sessions[session.id] = session
        try:
            yield AgentEndpoint(self.base_url(session), session.model, session.key)
        finally:
            del self._sessions[session.id]
            await session.close()

    def base_url(self, session: ModelSession) -> str:
        """Return a rollout's address, for OpenAI's clients."""
        return f"{self.address}/s/{session.id}/v1"

    def app(self) -> Starlette:
        """Return the application."""
        handlers: dict[str, tuple[_Handler, str]] = {
            openapi.PATH: (self._openapi, "GET"),
            "/v1/models": (self._models, "GET"),
            "/v1/models/{model:path}": (self._model, "GET"),
            **{dialect.path: (self._handler_of(dialect), "POST") for dialect in DIALECTS},
        }
        self._routes = [Route("/health", _health, methods=["GET"])]
        self._routes += [
            Route(prefix + path, handler, methods=[method])
            for path, (handler, method) in handlers.items()
            for prefix in ("", "/s/{session}")
        ]
        return Starlette(
            routes=self._routes,
            exception_handlers={APIError: _on_api_error, HTTPException: _on_http_exception},
        )

    def _handler_of(self, dialect: Dialect) -> _Handler:
        async def handle(http: Request) -> Response:
            session: ModelSession | None = None
            try:
                session = self._session_of(http, dialect.api_key(http.headers))
                seat = http.headers.get(SEAT_HEADER)
                if seat is not None:
                    session = session.in_seat(unquote(seat), http.headers.get(STINT_HEADER, ""))
                body = await read_json_object(http, _MAX_BODY_BYTES)
                if body.keys() & _SCHEMA_FIELDS:
                    call = await asyncio.to_thread(dialect.read, body, session)
                else:
                    call = dialect.read(body, session)
                return await answer(http, session, call)
            except APIError as error:
                if session is not None:
                    session.refused(error)
                return JSONResponse(dialect.error_body(error), error.status)

        return handle

    async def _openapi(self, _: Request) -> Response:
        bodies = {dialect.path: dialect.schema for dialect in DIALECTS}
        session_bodies = {f"/s/{{session}}{path}": schema for path, schema in bodies.items()}
        return JSONResponse(
            openapi.description("AgentRL agent endpoint", self._routes, bodies | session_bodies)
        )

    async def _models(self, http: Request) -> Response:
        session = self._session_of(http, bearer_key(http.headers))
        cards = [_card(name) for name in session.models]
        return JSONResponse({"object": "list", "data": cards})

    async def _model(self, http: Request) -> Response:
        session = self._session_of(http, bearer_key(http.headers))
        name = http.path_params["model"]
        if name not in session.models:
            raise APIError(f"unknown model {name!r}", status=404, code="model_not_found")
        return JSONResponse(_card(name))

    def _session_of(self, http: Request, key: str) -> ModelSession:
        """Return the rollout that a request belongs to."""
        session_id = http.path_params.get("session") or http.headers.get(SESSION_HEADER)
        if session_id is None:
            session = next((s for s in self._sessions.values() if _keys_match(key, s.key)), None)
            if session is None:
                raise APIError(
                    "the API key belongs to no rollout; use the base_url or api_key that the "
                    "agent was given",
                    status=401,
                    code="invalid_api_key",
                )
            return session
        session = self._sessions.get(session_id)
        if session is None:
            raise session_over()
        # An address is no secret: programs show it in their arguments and logs.
        if not _keys_match(key, session.key):
            reason = "belongs to another rollout" if key else "is missing"
            raise APIError(f"the API key {reason}", status=401, code="invalid_api_key")
        return session


class _Server(uvicorn.Server):
    """Does not handle signals, which the sampler handles."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "agentrl"}


def _keys_match(received: str, key: str) -> bool:
    # In constant time, so that the duration does not reveal how many characters match.
    return hmac.compare_digest(received.encode(), key.encode())


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return JSONResponse(error_body(error), error.status)


async def _on_http_exception(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == 404:
        detail = f"unknown route {http.url.path}"
        if "/v1/v1/" in http.url.path:
            detail += "; Anthropic's clients add /v1 to the base URL themselves"
    return await _on_api_error(http, APIError(detail, status=error.status_code))
