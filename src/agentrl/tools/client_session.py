"""One live client of the MCP SDK, on the server's transport."""

import asyncio
import logging
import os
import re
import shutil
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
from agentrl.runtime.child_processes import program
from agentrl.runtime.confinement import Confinement
from agentrl.tools.admission import MAX_MESSAGE_BYTES
from agentrl.tools.http_transport import FailureReportingTransport
from agentrl.tools.json_repair import repairing
from agentrl.tools.server_config import ROLLOUT_DIR, McpServer, ToolsConfig, http_headers
from agentrl.tools.server_failures import describe
from agentrl.tools.server_requests import PolledTasks, ServerQuestions
from agentrl.tools.stdio_transport import StdioServer, stdio_transport

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b")

_CLIENT_INFO = Implementation(name="agentrl", version="0.1.0")
_READ_MARGIN_SECONDS = (
    30.0  # HTTP waits longer than a call may take, so that the call's own timeout decides
)


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
        questions: ServerQuestions,
        on_tools_changed: Callable[[], None],
    ) -> None:
        self._server = server
        self._questions = questions
        self._on_tools_changed = on_tools_changed
        self._config = config
        log_dir = config.log_dir
        self._started = StdioServer(log_dir and log_dir / f"{config.log_prefix}{name}.log")
        self._stop = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._own())

    @property
    def alive(self) -> bool:
        """Whether the connection is not known to be lost or closed."""
        return not self._task.done()

    @property
    def pid(self) -> int | None:
        """The process of a server that was started for this connection."""
        return self._started.pid

    async def opened(self) -> Client:
        """Return the client once the handshake is done, or raise what went wrong with it."""
        limit = (
            self._config.start_timeout_seconds
            if self._server.transport == "stdio"
            else self._config.connect_timeout_seconds
        )
        waiting = asyncio.timeout(limit)
        try:
            async with waiting:
                return await asyncio.shield(self._opened)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError) and waiting.expired():
                raise TimeoutError(f"no response within {limit:g} s") from None
            raise

    async def close(self) -> None:
        """Close the connection, and stop a command that was started for it."""
        self._stop.set()
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _own(self) -> None:
        try:
            async with _open_client(
                self._server, self._config, self._started, self._questions, self._heard
            ) as client:
                self._opened.set_result(client)
                await self._watch_tools(client)
        except Exception as error:  # noqa: BLE001  top of a task; callers get the error
            if self._opened.done():
                logger.warning("lost MCP server at %s: %s", self._server.address, describe(error))
            else:
                words = self._last_words()
                self._opened.set_exception(
                    ToolError(f"{describe(error)}; {words}") if words else error
                )
        finally:
            if not self._opened.done():
                self._opened.cancel()

    def _last_words(self) -> str:
        """Return the last output of a command that was started for this connection, or its exit."""
        said, status = self._started.last_line, self._started.exit_status
        if said:
            return f"last output: {said}{_variable_hint(self._server, said)}"
        if status is None or status < 0:
            return ""
        return (
            f"the command exited without output (exit {status}); a Python server must end with "
            'server.run("stdio")'
        )

    async def _heard(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._on_tools_changed()

    async def _watch_tools(self, client: Client) -> None:
        """Listen for changes of the tools until the connection is closed.

        Before protocol 2026-07-28, servers send them without a subscription.
        """
        offered = client.server_capabilities.tools
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS or not (
            offered is not None and offered.list_changed
        ):
            await self._stop.wait()
            return
        listening = asyncio.create_task(self._listen(client))
        try:
            await self._stop.wait()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, client: Client) -> None:
        try:
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    self._on_tools_changed()
        except (MCPError, SubscriptionLost, TimeoutError) as error:
            # The list is also refreshed periodically.
            logger.info("%s does not report changes of its tools: %s", self._server.address, error)


def _variable_hint(server: McpServer, said: str) -> str:
    """Return how to pass on a variable that a command misses and this process has, or nothing."""
    for name in _VARIABLE.findall(said):
        if name in os.environ and name not in server.env:
            return (
                f' (commands receive only the variables in env: "env": {{"{name}": "${{{name}}}"}})'
            )
    return ""


@asynccontextmanager
async def _open_client(
    server: McpServer,
    config: ToolsConfig,
    started: StdioServer,
    questions: ServerQuestions,
    on_message: MessageHandlerFnT,
) -> AsyncIterator[Client]:
    timeout = server.call_timeout_seconds or config.call_timeout_seconds
    async with AsyncExitStack() as stack:
        transport: Transport
        if server.transport == "stdio":
            transport = repairing(
                await _started(server, config, started, stack), server.address, questions.note
            )
        elif server.transport == "sse":
            transport = repairing(
                sse_client(
                    server.url or "",
                    headers=http_headers(server, config),
                    timeout=config.connect_timeout_seconds,
                    sse_read_timeout=timeout + _READ_MARGIN_SECONDS,
                    httpx_client_factory=_bounded_client,
                ),
                server.address,
                questions.note,
            )
        else:
            http = _bounded_client(
                headers=http_headers(server, config),
                timeout=httpx2.Timeout(
                    config.connect_timeout_seconds, read=timeout + _READ_MARGIN_SECONDS
                ),
            )
            await stack.enter_async_context(http)
            transport = repairing(
                streamable_http_client(
                    server.url or "", http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES
                ),
                server.address,
                questions.note,
            )
        # Newer protocol versions have no sessions over HTTP; a server that keeps state in the
        # session needs the older protocol.
        mode = "legacy" if server.per_rollout else "auto"
        yield await stack.enter_async_context(
            Client(
                transport,
                client_info=_CLIENT_INFO,
                cache=None,
                mode=mode,
                elicitation_callback=questions.answer,
                message_handler=on_message,
                extensions=[PolledTasks()],
            )
        )


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
def _scratch_root() -> "tempfile.TemporaryDirectory[str]":
    """Return the parent of all scratch directories of this process; it is removed at its end."""
    return tempfile.TemporaryDirectory(prefix="agentrl-tools-", ignore_cleanup_errors=True)


async def _started(
    server: McpServer, config: ToolsConfig, started: StdioServer, stack: AsyncExitStack
) -> Transport:
    """Return the transport that starts a server's command, isolated from other servers."""
    confinement = config.confinement
    if confinement is None:
        scratch = Path(tempfile.mkdtemp(dir=_scratch_root().name))
        # In a thread: a command may leave a million files, and a process that is still writing
        # more.
        stack.push_async_callback(asyncio.to_thread, shutil.rmtree, scratch, ignore_errors=True)
        confinement = Confinement(scratch=scratch, hidden=config.hidden_paths)
    writable = tuple(Path(path) for path in server.writable)
    confinement = replace(confinement, writable=(*confinement.writable, *writable))

    def filled(text: str) -> str:
        return text.replace(ROLLOUT_DIR, str(confinement.scratch))

    words = [program(server.command or ""), *map(filled, server.args)]
    return stdio_transport(
        await asyncio.to_thread(confinement.command, words),
        environment=confinement.environment()
        | {name: filled(value.get_secret_value()) for name, value in server.env.items()},
        cwd=filled(server.cwd or "") or (confinement.scratch if confinement.read_only else None),
        started=started,
    )
