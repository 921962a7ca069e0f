"""`Gateway`: the OpenAI-compatible endpoint of a sampler process.

Every rollout has an address of its own, `/s/<session>/v1`; `/v1` itself serves the rollout whose API
key a request carries.
"""

import asyncio
import hmac
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.config.checks import is_loopback
from agentrl.config.sections import AgentSection
from agentrl.errors import ConfigError
from agentrl.gateway.chat import chat_body, chat_frames, text_body, text_frames
from agentrl.gateway.endpoint import AgentEndpoint
from agentrl.gateway.faults import Refusal
from agentrl.gateway.requests import read_chat, read_completion
from agentrl.gateway.responses import (
    as_chat,
    chat_messages,
    response_body,
    response_frames,
    response_id,
)
from agentrl.gateway.session import Session, session_over
from agentrl.gateway.upstream import Upstream
from agentrl.rollout import AsyncSampler

log = logging.getLogger(__name__)

SESSION_HEADER = "x-agentrl-session"
_BACKLOG = 1024
_GRACE_SECONDS = 1
_UPSTREAM_TIMEOUT = httpx.Timeout(600.0, connect=10.0)

_Handler = Callable[[Request, Session], Awaitable[Response]]
_T = TypeVar("_T")


class Gateway:
    """Serves the rollouts of a process; `open` is the usual way to one."""

    def __init__(self, section: AgentSection, model: str, upstream: Upstream, port: int) -> None:
        self._section = section
        self._model = model
        self._upstream = upstream
        self._sessions: dict[str, Session] = {}
        self._needs_key = not is_loopback(section.agent_gateway_host)
        host = section.agent_gateway_host
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @classmethod
    @asynccontextmanager
    async def open(cls, section: AgentSection, model: str) -> AsyncIterator["Gateway"]:
        """Listen on a free port until the context ends.

        Args:
            section: where to listen, and routes to other models.
            model: name of the trained model.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        host = section.agent_gateway_host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"--agent_gateway_host {host}: cannot listen there: {error.strerror or error}"
            ) from error
        async with httpx.AsyncClient(timeout=_UPSTREAM_TIMEOUT) as client:
            upstream = Upstream(section.agent_routes or {}, client)
            gateway = cls(section, model, upstream, listener.getsockname()[1])
            server = _Server(
                uvicorn.Config(
                    gateway.app(),
                    log_level="warning",
                    access_log=False,
                    lifespan="off",
                    timeout_graceful_shutdown=_GRACE_SECONDS,
                )
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            log.info("agents reach the policy at %s", gateway.address)
            try:
                yield gateway
            finally:
                server.should_exit = True
                await serving

    @asynccontextmanager
    async def session(self, sampler: AsyncSampler[Any]) -> AsyncIterator[Session]:
        """Open the door of one rollout; it closes with the context."""
        session = Session(sampler, self._section, self._model, self._upstream)
        self._sessions[session.id] = session
        try:
            yield session
        finally:
            del self._sessions[session.id]
            await session.close()

    def endpoint(self, session: Session) -> AgentEndpoint:
        """Return what an agent has to know to reach a rollout's model."""
        return AgentEndpoint(f"{self.address}/s/{session.id}/v1", session.model, session.key)

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
    completion = await _until_disconnect(http, session, session.chat(request))
    if request.stream:
        return _stream(chat_frames(completion, include_usage=request.include_usage))
    return JSONResponse(chat_body(completion))


async def _completion(http: Request, session: Session) -> Response:
    request = read_completion(await _json_object(http))
    completion = await _until_disconnect(http, session, session.complete(request))
    if request.stream:
        return _stream(text_frames(completion, include_usage=request.include_usage))
    return JSONResponse(text_body(completion))


async def _response(http: Request, session: Session) -> Response:
    body = await _json_object(http)
    chat = as_chat(body, session.messages_until(body.get("previous_response_id")))
    request = read_chat(chat)
    completion = await _until_disconnect(http, session, session.chat(request))
    session.keep_messages(response_id(completion), chat_messages(chat, completion))
    if request.stream:
        return _stream(response_frames(body, completion))
    return JSONResponse(response_body(body, completion))


def _stream(frames: Iterator[str]) -> Response:
    return StreamingResponse(frames, media_type="text/event-stream")


async def _until_disconnect(http: Request, session: Session, call: Coroutine[Any, Any, _T]) -> _T:
    """Run a call; it is cancelled when the client goes away or the rollout ends."""
    working = session.start(call)
    leaving = asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client is gone")
        if working.cancelled():
            raise session_over()
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _json_object(http: Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await http.body())
    except ValueError as error:
        raise Refusal(f"the body has to be JSON: {error}") from None
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
