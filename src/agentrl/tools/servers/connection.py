"""One connection to one MCP server, opened when needed and reopened when lost."""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mcp import Client, MCPError
from mcp.shared.dispatcher import ProgressFnT
from mcp.types import CONNECTION_CLOSED, PARSE_ERROR, CallToolResult, Tool
from pydantic import ValidationError

from agentrl.errors import CallTimedOut, InvalidResult, ToolError
from agentrl.runtime.loop_slots import LoopSlots
from agentrl.runtime.retries import retried
from agentrl.tools.servers.admission import FAILURE_KEY, MAX_TOOLS, describe, listing_problem
from agentrl.tools.servers.client_session import McpSession
from agentrl.tools.servers.result_content import with_linked_resources
from agentrl.tools.servers.served_question import ServedQuestion
from agentrl.tools.servers.server_config import McpServer, ToolsConfig

logger = logging.getLogger(__name__)

_PING_SECONDS = 5.0
_starts = LoopSlots(max(2, os.cpu_count() or 1))
"""Commands that start at the same time: a hundred that start together would stop an inference server on
the same machine for minutes."""
_NOT_LISTED = (MCPError, TimeoutError, ValueError)


class _Repeatable(Exception):
    """A call failed and may be repeated."""


class ServerConnection:
    """Calls one server's tools; connects, reconnects, and retries if that is safe."""

    def __init__(
        self,
        name: str,
        server: McpServer,
        config: ToolsConfig,
        question: ServedQuestion | None = None,
    ) -> None:
        """Prepare; `config` has the limits of calls, `question` is that of a rollout."""
        self.name = name
        self.server = server
        self._config = config
        self._question = question or config.example
        self._timeout = server.call_timeout_seconds or config.call_timeout_seconds
        self._max_seconds = max(self._timeout, config.max_call_seconds)
        self._label = f"MCP server {name!r} at {server.address}"
        self._session: McpSession | None = None
        self._connect_lock = asyncio.Lock()
        self._holds_state = False
        self.num_changes = 0
        """Number of tool list changes that the server announced."""
        self.instructions = ""
        """Usage instructions of the server, once its tools are listed."""
        self.protocol_version = ""
        """Of MCP, as negotiated, once its tools are listed."""

    def for_rollout(
        self, question: ServedQuestion, folder: Path | None = None
    ) -> "ServerConnection":
        """Return another connection to the server, which serves one rollout of a question.

        Args:
            question: the rollout's.
            folder: the private directory of its command; by default a new one.
        """
        config = self._config
        if folder is not None:
            config = config.with_scratch(folder)
        other = ServerConnection(self.name, self.server, config, question)
        other.instructions = self.instructions
        return other

    @property
    def pid(self) -> int | None:
        """The process of a server that was started for this connection."""
        return None if self._session is None else self._session.pid

    async def list_tools(self) -> list[Tool]:
        """Return all tools of the server."""

        async def attempt() -> list[Tool]:
            client = await self._client()
            try:
                tools = await self._tools_of(client)
            except _NOT_LISTED:
                await self._drop(client)
                raise
            self.instructions = (client.instructions or "").strip()
            self.protocol_version = client.protocol_version
            return tools

        try:
            return await retried(attempt, on=_NOT_LISTED, pauses=self._config.retry_pauses)
        except _NOT_LISTED as error:
            raise self._error("did not list its tools", error) from error

    async def list_tools_again(self) -> list[Tool]:
        """Return what `list_tools` does, but keep the connection, and the calls on it, on failure."""
        client = await self._client()
        try:
            return await self._tools_of(client)
        except _NOT_LISTED as error:
            raise self._error("did not list its tools", error) from error

    async def _tools_of(self, client: Client) -> list[Tool]:
        async with asyncio.timeout(self._config.connect_timeout_seconds):
            tools = await _all_tools(client)
        if (problem := listing_problem(tools)) is not None:
            raise ToolError(f"{self._label} {problem}")
        return tools

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        repeatable: bool,
        on_progress: ProgressFnT | None = None,
    ) -> CallToolResult:
        """Call a tool by its name on the server."""

        async def attempt() -> CallToolResult:
            client = await self._client()
            self._holds_state = self.server.per_rollout
            try:
                return await self._call_with_timeout(client, name, dict(arguments), on_progress)
            except TimeoutError as error:
                if await self._responds(client):
                    raise CallTimedOut(f"no result within {self._timeout:g} s") from error
                await self._drop(client)
                raise self._error("stopped responding during a call", error) from error
            except (RuntimeError, ValidationError) as error:
                # The SDK raises these when a result does not match the tool's schema.
                logger.warning("%s", self._error(f"returned an invalid result of {name}", error))
                raise InvalidResult(describe(error)) from error
            except MCPError as error:
                if await self._is_retryable(client, error, repeatable=repeatable):
                    raise _Repeatable(describe(error)) from error
                raise

        try:
            return await retried(attempt, on=_Repeatable, pauses=self._config.retry_pauses)
        except _Repeatable as error:
            self._holds_state = False
            raise ToolError(f"{self._label} failed on every attempt: {error}") from error
        except ToolError:
            self._holds_state = False  # this error reports the loss to the caller
            raise

    async def _call_with_timeout(
        self,
        client: Client,
        name: str,
        arguments: dict[str, Any],
        on_progress: ProgressFnT | None,
    ) -> CallToolResult:
        """Call a tool; each progress report extends its time, up to `max_call_seconds`."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._max_seconds
        async with asyncio.timeout(self._timeout) as limit:

            async def report_progress(
                progress: float, total: float | None, message: str | None
            ) -> None:
                limit.reschedule(min(now() + self._timeout, deadline))
                if on_progress is not None:
                    await on_progress(progress, total, message)

            result = await client.call_tool(name, arguments, progress_callback=report_progress)
            return await with_linked_resources(client, result)

    async def close(self) -> None:
        """Close the connection, and stop a command that was started for it."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _is_retryable(self, client: Client, error: MCPError, *, repeatable: bool) -> bool:
        """Return whether a failed call may be retried; False for the server's own errors."""
        failure = error.data.get(FAILURE_KEY) if isinstance(error.data, dict) else None
        if failure == "refused":
            raise self._error("refused the call", error) from error
        if failure == "too_large":
            raise InvalidResult(error.message) from error
        if error.code == PARSE_ERROR:
            raise self._error("sent an invalid response", error) from error
        if failure == "session_ended":
            await self._drop(client)
        if failure in ("session_ended", "not_sent"):
            return True
        # Servers use the SDK's code of a closed connection for their own errors, too: ping them.
        closed = error.code == CONNECTION_CLOSED and not await self._responds(client)
        if failure != "lost" and not closed:
            return False
        if closed:
            await self._drop(client)
        if repeatable or self._config.retry_lost_calls:
            return True
        raise self._error("lost the connection during a call", error) from error

    async def _responds(self, client: Client) -> bool:
        try:
            async with asyncio.timeout(_PING_SECONDS):
                await client.list_tools(cache_mode="bypass")
        except (MCPError, TimeoutError):
            return False
        return True

    async def _client(self) -> Client:
        """Return the live client, connecting if there is none."""
        async with self._connect_lock:
            if self._session is not None and self._session.alive:
                return await self._session.opened()
            if self._holds_state:
                self._holds_state = False
                raise ToolError(
                    f"{self._label} lost its session, and with it the state of earlier calls"
                )
            try:
                return await retried(self._connect, on=Exception, pauses=self._config.retry_pauses)
            except Exception as error:
                raise self._error("is unreachable", error) from error

    async def _connect(self) -> Client:
        async with _starts.here() if self.server.transport == "stdio" else nullcontext():
            session = McpSession(
                self.name, self.server, self._config, self._count_change, self._question
            )
            client = await session.opened()
        self._session = session
        return client

    def _count_change(self) -> None:
        self.num_changes += 1

    async def _drop(self, client: Client) -> None:
        """Close the connection, unless another call has already replaced it."""
        async with self._connect_lock:
            session = self._session
            if session is not None and session.alive and await session.opened() is not client:
                return
            await self.close()

    def _error(self, problem: str, error: BaseException) -> ToolError:
        return ToolError(f"{self._label} {problem}: {describe(error)}")


async def _all_tools(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        # A server with endless pages is rejected based on the tools listed so far.
        is_last = page.next_cursor is None or page.next_cursor == cursor
        if is_last or len(tools) > MAX_TOOLS:
            return tools
        cursor = page.next_cursor
