"""The environment server of `agentrl env up`: many MCP servers behind one address.

Every client session gets its own child servers, started at the first call of one of their tools and
stopped with the session. Agents are isolated from one another: child servers have private
namespaces, a scratch directory and limits (`runtime.processes.wall`). A child that died is restarted
at the next call.
"""

import asyncio
import contextlib
import hmac
import logging
import re
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.errors import ToolCallFailed, ToolError
from agentrl.runtime.http.http_guard import HttpGuard
from agentrl.runtime.http.http_servers import serve_until_signalled, server_config
from agentrl.runtime.processes.wall import TOOL_MEMORY_BYTES, remove_folder, scratch_directory
from agentrl.tools.servers.admission import FAILURE_KEY
from agentrl.tools.servers.connection import ServerConnection
from agentrl.tools.servers.server_config import McpServer, ToolsConfig
from agentrl.tools.tool_specs import is_repeatable, unique_names

logger = logging.getLogger(__name__)

FILTER_HEADER = "MCP_SERVERS"
"""Request header with the comma-separated names of the servers that a client wants to see."""
CLIENT_HEADER = "agentrl-client"
"""Request header that identifies clients of protocols without sessions."""
_CLIENT_NAME = re.compile(r"[\w.~-]{16,128}", re.ASCII)
_SESSION_HEADER = "mcp-session-id"
_VERSION_HEADER = "mcp-protocol-version"
_REAP_SECONDS = 5.0
_CLOSE_SECONDS = 1
"""Grace period of running calls after a stop signal."""


@dataclass
class _ClientSession:
    """The child servers of one client, and the directory that they share."""

    scratch: Path
    connections: dict[str, ServerConnection] = field(default_factory=dict)
    last_used: float = field(default_factory=time.monotonic)
    calls_in_flight: int = 0

    async def close(self) -> None:
        """Stop the child servers and delete their files."""
        for connection in self.connections.values():
            await connection.close()
        await asyncio.to_thread(remove_folder, self.scratch)


@dataclass(frozen=True)
class _Offer:
    """One tool of one child server."""

    server: str
    tool: Tool


class Environment:
    """Serves the tools of all children over streamable HTTP."""

    def __init__(
        self,
        config: ToolsConfig,
        *,
        token: SecretStr | None,
        session_idle_seconds: float = 1800.0,
        max_sessions: int = 64,
        server_memory_bytes: int = TOOL_MEMORY_BYTES,
    ) -> None:
        """Prepare without starting child servers.

        Args:
            config: the child servers and the limits of their calls.
            token: bearer token that clients must send; None disables authentication.
            session_idle_seconds: a session is closed after this time without a call.
            max_sessions: maximum number of clients with child servers at the same time.
            server_memory_bytes: memory limit of each child server.
        """
        self._config = config
        self._max_sessions = max_sessions
        self._memory_bytes = server_memory_bytes
        self._token = token
        self._idle_seconds = session_idle_seconds
        self._sessions: dict[str, _ClientSession] = {}
        self._list_lock: asyncio.Lock = asyncio.Lock()
        self._tools: dict[str, list[Tool]] = {}

    @property
    def num_sessions(self) -> int:
        """Number of clients that have children at the moment."""
        return len(self._sessions)

    def app(self, *, host: str) -> ASGIApp:
        """Return the ASGI application: `/mcp` for clients, `/health` for probes."""
        server: Server[Any] = Server(
            "agentrl-environment",
            version="1",
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )
        app = server.streamable_http_app(
            host=host,
            session_idle_timeout=self._idle_seconds,
            # `HttpGuard` does the SDK's checks, as for all servers.
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            custom_starlette_routes=[Route("/health", self._health)],
        )
        sdk_lifespan = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(starlette: Starlette) -> AsyncIterator[Any]:
            async with sdk_lifespan(starlette) as state, self._reaper():
                yield state

        app.router.lifespan_context = lifespan
        return HttpGuard(_SessionGate(app, self), host)

    def admits(self, headers: Headers) -> bool:
        """Return whether a request carries the token."""
        if self._token is None:
            return True
        scheme, _, received = headers.get("authorization", "").partition(" ")
        expected = self._token.get_secret_value().encode()
        return scheme.lower() == "bearer" and hmac.compare_digest(
            received.strip().encode(), expected
        )

    async def end_session(self, session_id: str) -> None:
        """End a client's children; nothing happens if it has none."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def _reaper(self) -> AsyncIterator[None]:
        """Stop the children of clients that vanished, and all children on shutdown."""
        with scratch_directory("agentrl-env-") as root:
            self._root = Path(root)
            reaper = asyncio.create_task(self._reap())
            try:
                yield
            finally:
                reaper.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reaper
                for session_id in list(self._sessions):
                    await self.end_session(session_id)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(_REAP_SECONDS, self._idle_seconds))
            limit = time.monotonic() - self._idle_seconds
            for session_id, session in list(self._sessions.items()):
                if not session.calls_in_flight and session.last_used < limit:
                    await self.end_session(session_id)

    async def _health(self, _request: Request) -> Response:
        servers = sorted(self._config.selected)
        return JSONResponse({"status": "ok", "servers": servers, "sessions": self.num_sessions})

    async def _list_tools(
        self, ctx: ServerRequestContext[Any, Request], _params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        offers = await self._offers(_headers(ctx))
        tools = [
            offer.tool.model_copy(update={"name": name}) for name, offer in sorted(offers.items())
        ]
        return ListToolsResult(tools=tools)

    async def _call_tool(
        self, ctx: ServerRequestContext[Any, Request], params: CallToolRequestParams
    ) -> CallToolResult:
        headers = _headers(ctx)
        offers = await self._offers(headers)
        offer = offers.get(params.name)
        if offer is None:
            names = ", ".join(sorted(offers)) or "none"
            raise MCPError(INVALID_PARAMS, f"no tool {params.name!r} here (tools: {names})")
        session = self._session(_client_name(headers) or headers[_SESSION_HEADER])
        session.calls_in_flight += 1
        try:
            return await self._connection(session, offer.server).call_tool(
                offer.tool.name,
                params.arguments or {},
                repeatable=is_repeatable(offer.tool),
                on_progress=ctx.session.report_progress,
            )
        except ToolCallFailed as error:
            return CallToolResult(
                content=[TextContent(type="text", text=str(error))], is_error=True
            )
        except ToolError as error:
            raise _unavailable(error) from error
        finally:
            session.calls_in_flight -= 1
            session.last_used = time.monotonic()

    def _connection(self, session: _ClientSession, name: str) -> ServerConnection:
        if name not in session.connections:
            # Children that are reached over HTTP also get a session for each client.
            server = self._config.selected[name].model_copy(update={"per_rollout": True})
            config = self._confined_config(session.scratch)
            session.connections[name] = ServerConnection(name, server, config)
        return session.connections[name]

    def _session(self, session_id: str) -> _ClientSession:
        """Return a client's child servers."""
        if session_id not in self._sessions:
            if len(self._sessions) >= self._max_sessions:
                text = (
                    f"{self._max_sessions} sessions are open, which is the limit (--max_sessions)"
                )
                raise MCPError(INTERNAL_ERROR, text, {FAILURE_KEY: "not_sent"})
            self._sessions[session_id] = _ClientSession(Path(tempfile.mkdtemp(dir=self._root)))
        return self._sessions[session_id]

    def _confined_config(self, scratch: Path) -> ToolsConfig:
        wall = replace(
            self._config.wall,
            scratch=scratch,
            directory=str(scratch),
            memory_bytes=self._memory_bytes,
        )
        return self._config.model_copy(update={"wall": wall})

    async def _offers(self, headers: Headers) -> dict[str, _Offer]:
        """Return the tools that a client may call, by displayed name.

        A name used by several servers is qualified with the server's name.
        """
        visible = self._visible_servers(headers)
        async with self._list_lock:
            for name, server in visible.items():
                if name not in self._tools:
                    self._tools[name] = await self._list_server_tools(name, server)
        offers = [_Offer(name, tool) for name in visible for tool in self._tools[name]]
        names = unique_names([(offer.server, offer.tool.name) for offer in offers])
        return dict(zip(names, offers, strict=True))

    def _visible_servers(self, headers: Headers) -> dict[str, McpServer]:
        names = {name.strip() for name in headers.get(FILTER_HEADER, "").split(",")} - {""}
        unknown = sorted(names - set(self._config.selected))
        if unknown:
            known = ", ".join(sorted(self._config.selected))
            raise MCPError(
                INVALID_PARAMS, f"{FILTER_HEADER}: no server {unknown[0]!r} here (servers: {known})"
            )
        return {
            name: server
            for name, server in self._config.selected.items()
            if not names or name in names
        }

    async def _list_server_tools(self, name: str, server: McpServer) -> list[Tool]:
        """List a server's tools over a temporary connection: children start lazily."""
        scratch = Path(tempfile.mkdtemp(dir=self._root))
        config = self._confined_config(scratch)
        connection = ServerConnection(name, server, config)
        try:
            return await connection.list_tools()
        except ToolError as error:
            raise _unavailable(error) from error
        finally:
            await connection.close()
            await asyncio.to_thread(remove_folder, scratch)


class _SessionGate:
    """ASGI middleware: checks token and protocol version, and ends sessions."""

    def __init__(self, app: ASGIApp, environment: Environment) -> None:
        self._app = app
        self._environment = environment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        rejection = self._rejection(headers)
        if rejection is not None:
            await rejection(scope, receive, send)
            return
        client = _client_name(headers)
        if scope["method"] == "DELETE" and client is not None:
            await self._environment.end_session(client)
            await Response(status_code=204)(scope, receive, send)
            return
        await self._app(scope, receive, send)
        if scope["method"] == "DELETE" and _SESSION_HEADER in headers:
            await self._environment.end_session(headers[_SESSION_HEADER])

    def _rejection(self, headers: Headers) -> Response | None:
        if not self._environment.admits(headers):
            return JSONResponse(
                {"error": "unauthorized: send the environment's token as a bearer token"},
                status_code=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
        version = headers.get(_VERSION_HEADER)
        if version is None or version in HANDSHAKE_PROTOCOL_VERSIONS:
            return None
        if _client_name(headers) is not None:
            return None
        # Later versions have no sessions over HTTP, which are needed to distinguish clients.
        error = {
            "code": UNSUPPORTED_PROTOCOL_VERSION,
            "message": "this server keeps state per client; start with `initialize`, or send a "
            f"random name of 16 to 128 letters and digits in the header {CLIENT_HEADER}",
            "data": {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version},
        }
        return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=400)


def _headers(ctx: ServerRequestContext[Any, Request]) -> Headers:
    assert ctx.request is not None, "served over HTTP only"
    return ctx.request.headers


def _client_name(headers: Headers) -> str | None:
    """Return the name that a client sends if its protocol has no sessions, else None."""
    name = headers.get(CLIENT_HEADER, "")
    if _SESSION_HEADER in headers or not _CLIENT_NAME.fullmatch(name):
        return None
    return f"{CLIENT_HEADER}: {name}"  # differs from every session id


def _unavailable(error: ToolError) -> MCPError:
    """Return an error that tells an AgentRL sampler that the server failed, not the tool."""
    return MCPError(INTERNAL_ERROR, str(error), {FAILURE_KEY: "lost"})


async def serve(
    environment: Environment,
    listener: socket.socket,
    *,
    host: str,
    when_ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM; running calls are abandoned after a second."""
    config = server_config(environment.app(host=host), grace_seconds=_CLOSE_SECONDS, lifespan="on")
    await serve_until_signalled(config, listener, when_ready)
