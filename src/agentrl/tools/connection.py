"""One connection to one MCP server, opened when needed and opened again when lost."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client import Transport
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.dispatcher import ProgressFnT
from mcp.types import (
    CONNECTION_CLOSED,
    REQUEST_TIMEOUT,
    CallToolResult,
    Implementation,
    Tool,
)
from pydantic import ValidationError

from agentrl.errors import ToolError
from agentrl.tools.breaker import CircuitBreaker
from agentrl.tools.config import McpServer, ToolsConfig, http_headers
from agentrl.tools.faults import CallTimedOut, InvalidResult, describe
from agentrl.tools.http_transport import FAILURE_KEY, FailureReportingTransport

logger = logging.getLogger(__name__)

_CLIENT_INFO = Implementation(name="agentrl", version="0.1.0")
_PING_SECONDS = 5.0
_READ_MARGIN_SECONDS = 30.0  # HTTP waits longer than the call may take, so that the call decides
_MAX_EVENT_BYTES = 64 * 2**20


class _Session:
    """A live SDK client, owned by one task: the SDK must be left by the task that entered it."""

    def __init__(self, server: McpServer, config: ToolsConfig) -> None:
        self._server = server
        self._config = config
        self._stop = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._own())

    @property
    def alive(self) -> bool:
        return not self._task.done()

    async def opened(self) -> Client:
        """Wait until the handshake is done, and raise what went wrong with it."""
        try:
            async with asyncio.timeout(self._config.connect_timeout_seconds):
                return await asyncio.shield(self._opened)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._stop.set()
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _own(self) -> None:
        try:
            async with _open_client(self._server, self._config) as client:
                self._opened.set_result(client)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001  whatever ended it, callers learn of it
            if self._opened.done():
                logger.warning("lost MCP server at %s: %s", self._server.address, describe(error))
            else:
                self._opened.set_exception(error)
        finally:
            if not self._opened.done():
                self._opened.cancel()


class ServerConnection:
    """Calls one server's tools; connects, reconnects and repeats where that does no harm."""

    def __init__(self, name: str, server: McpServer, config: ToolsConfig) -> None:
        self.name = name
        self.server = server
        self._config = config
        self._timeout = server.call_timeout_seconds or config.call_timeout_seconds
        self._longest = max(self._timeout, config.max_call_seconds)
        self._breaker = CircuitBreaker(
            f"MCP server {name!r} at {server.address}",
            threshold=config.failures_until_down,
            seconds=config.down_seconds,
            patience=config.down_patience_seconds,
        )
        self._session: _Session | None = None
        self._connecting = asyncio.Lock()

    async def list_tools(self) -> list[Tool]:
        """Return all tools of the server.

        Raises:
            ToolError: the server cannot be reached or does not answer as an MCP server.
        """
        for attempt in range(self._config.max_retries + 1):
            client = await self._client()
            try:
                async with asyncio.timeout(self._config.connect_timeout_seconds):
                    return await _all_tools(client)
            except (MCPError, TimeoutError, ValueError) as error:
                await self._drop(client)
                if attempt == self._config.max_retries:
                    raise self._error("does not list its tools", error) from error
            await self._pause(attempt)
        raise AssertionError("unreachable")

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        repeatable: bool,
        on_progress: ProgressFnT | None = None,
    ) -> CallToolResult:
        """Call a tool by its server's name for it.

        Args:
            name: the tool.
            arguments: its arguments.
            repeatable: the call may be carried out twice.
            on_progress: told of the progress that the tool reports.

        Raises:
            MCPError: the server answered with an error of its own.
            CallTimedOut: the tool takes too long.
            InvalidResult: the tool's result breaks its server's own promise.
            ToolError: the infrastructure failed.
        """
        await self._breaker.admit()
        healthy: bool | None = None
        try:
            result = await self._call_tool(
                name, arguments, repeatable=repeatable, on_progress=on_progress
            )
            healthy = True
        except (MCPError, CallTimedOut, InvalidResult):
            healthy = True
            raise
        except ToolError:
            healthy = False
            raise
        finally:
            self._breaker.settle(healthy=healthy)
        return result

    async def _call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        repeatable: bool,
        on_progress: ProgressFnT | None,
    ) -> CallToolResult:
        attempt = 0
        while True:
            client = await self._client()
            try:
                return await self._within_time(client, name, dict(arguments), on_progress)
            except (RuntimeError, ValidationError) as error:
                # The SDK's ways to say that a result is not what the server promised.
                logger.warning("%s", self._error(f"returned an invalid result of {name}", error))
                raise InvalidResult(describe(error)) from error
            except MCPError as error:
                if not await self._may_repeat(client, error, repeatable=repeatable):
                    raise
                if attempt == self._config.max_retries:
                    raise self._error("failed again and again", error) from error
            await self._pause(attempt)
            attempt += 1

    async def _within_time(
        self,
        client: Client,
        name: str,
        arguments: dict[str, Any],
        on_progress: ProgressFnT | None,
    ) -> CallToolResult:
        """Call a tool; every progress that it reports grants it more time.

        Raises:
            MCPError: with the code REQUEST_TIMEOUT when the time is over, too.
        """
        now = asyncio.get_running_loop().time
        at_the_latest = now() + self._longest
        try:
            async with asyncio.timeout(self._timeout) as limit:

                async def grant(progress: float, total: float | None, message: str | None) -> None:
                    limit.reschedule(min(now() + self._timeout, at_the_latest))
                    if on_progress is not None:
                        await on_progress(progress, total, message)

                return await client.call_tool(name, arguments, progress_callback=grant)
        except TimeoutError:
            raise MCPError(REQUEST_TIMEOUT, "timed out") from None

    async def close(self) -> None:
        """End the connection; a started command is ended with it."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _may_repeat(self, client: Client, error: MCPError, *, repeatable: bool) -> bool:
        """Whether to call again. False: the error is the server's own answer.

        Raises:
            CallTimedOut: the tool takes too long.
            ToolError: the failure is one of infrastructure, and a second call might do harm.
        """
        failure = error.data.get(FAILURE_KEY) if isinstance(error.data, dict) else None
        if failure == "refused":
            raise self._error("refused the call", error) from error
        if error.code == REQUEST_TIMEOUT:
            if await self._answers(client):
                raise CallTimedOut(f"no result within {self._timeout:g} s") from error
            await self._drop(client)
            raise self._error("stopped answering during a call", error) from error
        if failure == "session_ended":
            await self._drop(client)
        if failure in ("session_ended", "not_sent"):
            return True
        if failure == "lost" or error.code == CONNECTION_CLOSED:
            if failure is None:
                await self._drop(client)
            if repeatable or self._config.retry_lost_calls:
                return True
            raise self._error("was lost during a call", error) from error
        return False

    async def _answers(self, client: Client) -> bool:
        try:
            async with asyncio.timeout(_PING_SECONDS):
                await client.list_tools(cache_mode="bypass")
        except (MCPError, TimeoutError):
            return False
        return True

    async def _client(self) -> Client:
        """Return the live client, connecting if there is none."""
        async with self._connecting:
            if self._session is not None and self._session.alive:
                return await self._session.opened()
            for attempt in range(self._config.max_retries + 1):
                session = _Session(self.server, self._config)
                try:
                    client = await session.opened()
                except Exception as error:
                    if attempt == self._config.max_retries:
                        raise self._error("cannot be reached", error) from error
                else:
                    self._session = session
                    return client
                await self._pause(attempt)
        raise AssertionError("unreachable")

    async def _drop(self, client: Client) -> None:
        """Close the connection unless another call has replaced it already."""
        async with self._connecting:
            session = self._session
            if session is not None and session.alive and await session.opened() is not client:
                return
            await self.close()

    async def _pause(self, attempt: int) -> None:
        await asyncio.sleep(min(self._config.retry_delay_seconds * 2**attempt, 10.0))

    def _error(self, what: str, error: BaseException) -> ToolError:
        return ToolError(
            f"MCP server {self.name!r} at {self.server.address} {what}: {describe(error)}"
        )


def is_repeatable(tool: Tool) -> bool:
    """Return whether a tool declares that calling it twice does no harm."""
    hints = tool.annotations
    return hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)


async def _all_tools(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if page.next_cursor is None or page.next_cursor == cursor:
            return tools
        cursor = page.next_cursor


@asynccontextmanager
async def _open_client(server: McpServer, config: ToolsConfig) -> AsyncIterator[Client]:
    timeout = server.call_timeout_seconds or config.call_timeout_seconds
    async with AsyncExitStack() as stack:
        transport: Transport
        if server.transport == "stdio":
            transport = stdio_client(_stdio_parameters(server), errlog=sys.stderr)
        elif server.transport == "sse":
            transport = sse_client(
                server.url or "",
                headers=http_headers(server, config),
                timeout=config.connect_timeout_seconds,
                sse_read_timeout=timeout + _READ_MARGIN_SECONDS,
            )
        else:
            http = httpx2.AsyncClient(
                headers=http_headers(server, config),
                timeout=httpx2.Timeout(
                    config.connect_timeout_seconds, read=timeout + _READ_MARGIN_SECONDS
                ),
                transport=FailureReportingTransport(),
            )
            await stack.enter_async_context(http)
            transport = streamable_http_client(
                server.url or "", http_client=http, max_sse_event_size=_MAX_EVENT_BYTES
            )
        # Newer protocol versions have no sessions over HTTP; a server that keeps its state in the
        # session is spoken to in the older way.
        mode = "legacy" if server.per_rollout else "auto"
        yield await stack.enter_async_context(
            Client(transport, client_info=_CLIENT_INFO, cache=None, mode=mode)
        )


def _stdio_parameters(server: McpServer) -> StdioServerParameters:
    return StdioServerParameters(
        command=server.command or "",
        args=list(server.args),
        env={name: value.get_secret_value() for name, value in server.env.items()},
        cwd=server.cwd,
    )
