"""One live client of the MCP SDK, on the server's transport."""

import asyncio
import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import httpx2
from mcp import Client, MCPError
from mcp.client import Transport
from mcp.client.session import IncomingMessage, MessageHandlerFnT
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.types import Implementation, ToolListChangedNotification
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from agentrl.errors import ToolError
from agentrl.runtime.installation import package_version
from agentrl.runtime.processes.child_processes import program
from agentrl.runtime.processes.wall import ScratchDirectory, remove_folder, scratch_directory
from agentrl.tools.servers.admission import MAX_MESSAGE_BYTES, describe
from agentrl.tools.servers.http_transport import FailureReportingTransport
from agentrl.tools.servers.result_content import accept_misfits
from agentrl.tools.servers.served_question import PLACEHOLDER, ServedQuestion
from agentrl.tools.servers.server_config import McpServer, ToolsConfig, http_headers
from agentrl.tools.servers.stdio_transport import StdioServer, stdio_transport

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b")

# HTTP waits longer than a call may take, so that the call's own timeout decides.
_READ_MARGIN_SECONDS = 30.0


class McpSession:
    """A live SDK client, owned by a dedicated task.

    The SDK's contexts must be exited by the task that entered them, while calls come from many
    tasks.
    """

    def __init__(
        self,
        name: str,
        server: McpServer,
        config: ToolsConfig,
        on_tools_changed: Callable[[], None],
        question: ServedQuestion,
    ) -> None:
        self._server = server
        self._question = question
        self._on_tools_changed = on_tools_changed
        self._config = config
        log_dir = config.log_dir
        log = log_dir and log_dir / f"{config.log_prefix}{name}.log"
        self._child = StdioServer(server.address, log)
        self._stop = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return not self._task.done()

    @property
    def pid(self) -> int | None:
        """The process of a server that was started for this connection."""
        return self._child.pid

    async def opened(self) -> Client:
        """Return the client after the handshake, or raise the error that prevented it."""
        limit = (
            self._config.start_timeout_seconds
            if self._server.transport == "stdio"
            else self._config.connect_timeout_seconds
        )
        timeout_scope = asyncio.timeout(limit)
        try:
            async with timeout_scope:
                return await asyncio.shield(self._opened)
        except BaseException as error:
            details = self._failure_details()
            await self.close()
            if isinstance(error, TimeoutError) and timeout_scope.expired():
                said = f"; {details}" if details else ""
                raise TimeoutError(f"no response within {limit:g} s{said}") from None
            raise

    async def close(self) -> None:
        """Close the connection, and stop a command that was started for it."""
        self._stop.set()
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            async with _open_client(
                self._server, self._config, self._child, self._on_message, self._question
            ) as client:
                self._opened.set_result(client)
                await self._watch_tools(client)
        except Exception as error:  # noqa: BLE001  top of a task; callers get the error
            if self._opened.done():
                logger.warning("lost MCP server at %s: %s", self._server.address, describe(error))
            else:
                details = self._failure_details()
                self._opened.set_exception(
                    ToolError(f"{describe(error)}; {details}") if details else error
                )
        finally:
            if not self._opened.done():
                self._opened.cancel()

    def _failure_details(self) -> str:
        """Return the last output of the command that was started, or its exit status; may be empty."""
        last_line, status = self._child.last_line, self._child.exit_status
        if last_line:
            return f"last output: {last_line}{_variable_hint(self._server, last_line)}{self._child.hint}"
        if status is None or status < 0:
            return ""
        return (
            f"the command exited without output (exit {status}); a Python server must end with "
            'server.run("stdio")'
        )

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._on_tools_changed()
        elif isinstance(message, Exception) and self._server.transport == "sse":
            # Only here, the SDK does not tell the call that waits for the message.
            text = "%s sent what is not an MCP message, and the connection ends: %s"
            logger.warning(text, self._server.address, describe(message))
            self._stop.set()

    async def _watch_tools(self, client: Client) -> None:
        """Listen for changes of the tools until the connection is closed.

        Before protocol 2026-07-28, servers send them without a subscription.
        """
        capability = client.server_capabilities.tools
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS or not (
            capability is not None and capability.list_changed
        ):
            await self._stop.wait()
            return
        listener = asyncio.create_task(self._listen(client))
        try:
            await self._stop.wait()
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _listen(self, client: Client) -> None:
        try:
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    self._on_tools_changed()
        except (MCPError, SubscriptionLost, TimeoutError) as error:
            # The list is also refreshed periodically.
            logger.info("%s does not report changes of its tools: %s", self._server.address, error)


def _variable_hint(server: McpServer, output: str) -> str:
    """Return a hint for a variable that a command lacks but this process has, or an empty text."""
    for name in _VARIABLE.findall(output):
        if name in os.environ and name not in server.env:
            return (
                f' (commands receive only the variables in env: "env": {{"{name}": "${{{name}}}"}})'
            )
    return ""


@asynccontextmanager
async def _open_client(
    server: McpServer,
    config: ToolsConfig,
    child: StdioServer,
    on_message: MessageHandlerFnT,
    question: ServedQuestion,
) -> AsyncIterator[Client]:
    timeout = server.call_timeout_seconds or config.call_timeout_seconds
    headers = http_headers(server, config)
    if server.per_rollout:
        headers = {name: question.filled(text) for name, text in headers.items()}
        headers |= question.headers()
    async with AsyncExitStack() as stack:
        transport: Transport
        if server.transport == "stdio":
            transport = await _command_transport(server, config, child, question, stack)
        elif server.transport == "sse":
            transport = sse_client(
                server.url or "",
                headers=headers,
                timeout=config.connect_timeout_seconds,
                sse_read_timeout=timeout + _READ_MARGIN_SECONDS,
                httpx_client_factory=_bounded_client,
            )
        else:
            http = _bounded_client(
                headers=headers,
                timeout=httpx2.Timeout(
                    config.connect_timeout_seconds, read=timeout + _READ_MARGIN_SECONDS
                ),
            )
            await stack.enter_async_context(http)
            transport = streamable_http_client(
                server.url or "", http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES
            )
        # Newer protocol versions have no sessions over HTTP; a server that keeps state in the
        # session needs the older protocol.
        mode = "legacy" if server.per_rollout else "auto"
        client = await stack.enter_async_context(
            Client(
                transport,
                client_info=Implementation(name="agentrl", version=package_version()),
                cache=None,
                mode=mode,
                message_handler=on_message,
            )
        )
        accept_misfits(client, server.address)
        yield client


def _bounded_client(
    headers: dict[str, str] | None = None,
    timeout: httpx2.Timeout | None = None,
    auth: httpx2.Auth | None = None,
) -> httpx2.AsyncClient:
    """Return a client whose responses are checked against limits before the SDK reads them."""
    return httpx2.AsyncClient(
        headers=headers, timeout=timeout, auth=auth, transport=FailureReportingTransport()
    )


@cache
def _scratch_root() -> ScratchDirectory:
    """Return the parent of all scratch directories; it is removed when this process exits."""
    return scratch_directory("agentrl-tools-")


@asynccontextmanager
async def scratch_folder() -> AsyncIterator[Path]:
    """Yield a directory that no program sees but one started for it; it is deleted at the end."""
    folder = Path(tempfile.mkdtemp(dir=_scratch_root().name))
    try:
        yield folder
    finally:
        # In a thread: a command may leave a million files, and a process that still writes.
        await asyncio.to_thread(remove_folder, folder)


def _absolute_args(server: McpServer, directory: str) -> list[str]:
    """Return the arguments; in a rollout's directory, files of the run's have their full path."""
    if PLACEHOLDER.search(server.cwd or "") is None:
        return [*server.args]
    return [
        os.path.abspath(word)
        if ("/" in word or "." in word)
        and PLACEHOLDER.search(word) is None
        and os.path.isfile(word)
        and not os.path.exists(os.path.join(directory, word))
        else word
        for word in server.args
    ]


async def _command_transport(
    server: McpServer,
    config: ToolsConfig,
    child: StdioServer,
    question: ServedQuestion,
    stack: AsyncExitStack,
) -> Transport:
    """Return the transport that starts a server's command, isolated from other servers."""
    wall = config.wall
    if wall.scratch is None:
        folder = await stack.enter_async_context(scratch_folder())
        await server.prepare(question, folder)
        wall = replace(wall, scratch=folder)

    def filled(text: str) -> str:
        return question.filled(text, wall.scratch)

    wall = replace(
        wall,
        readable=(*wall.readable, *server.named_paths()),
        writable=(*wall.writable, *map(Path, server.writable)),
        directory=filled(server.cwd or "") or wall.directory or str(Path.cwd()),
    )
    argv = [program(server.command or ""), *map(filled, _absolute_args(server, wall.directory))]
    variables = {name: filled(text.get_secret_value()) for name, text in server.env.items()}
    return stdio_transport(
        await asyncio.to_thread(wall.command, argv),
        environment=wall.environment() | variables,
        child=child,
    )
