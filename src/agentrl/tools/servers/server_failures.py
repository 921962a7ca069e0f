"""Failures of tool servers: their wording, the wait before a retry, and the circuit breaker."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mcp import MCPError

from agentrl.errors import ToolCallFailed, ToolError
from agentrl.runtime.printable import printable
from agentrl.tools.servers.server_config import ToolsConfig

_MAX_CHARS = 500
_MAX_PAUSE_SECONDS = 10.0


def describe(error: BaseException) -> str:
    """Describe an error in one short line, looking into exception groups.

    Error texts come from servers, so they are truncated and made printable.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error)[: 2 * _MAX_CHARS].split())[:_MAX_CHARS]
    text = printable(text)
    if isinstance(error, MCPError | ToolError) and text:
        return text
    if isinstance(error, TimeoutError) and not text:
        return "timed out"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def pause_before_retry(config: ToolsConfig, attempt: int) -> None:
    """Wait before retry number `attempt`, counted from 0: twice as long each time, up to 10 s."""
    await asyncio.sleep(min(config.retry_delay_seconds * 2**attempt, _MAX_PAUSE_SECONDS))


class CircuitBreaker:
    """Circuit breaker: counts a server's consecutive failures, and delays callers while it is down.

    After `threshold` failures the circuit is open. Every `seconds`, one caller is let through to
    probe the server; the others wait for its result, for at most `patience` seconds. A
    success closes the circuit.
    """

    def __init__(self, server: str, *, threshold: int, seconds: float, patience: float) -> None:
        """Start with a closed circuit; `server` is its name in errors."""
        self._server = server
        self._threshold = threshold
        self._seconds = seconds
        self._patience = patience
        self._num_failures = 0
        self._down_since = 0.0
        self._retry_at = 0.0
        self._probing = False
        self._changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the server is considered down."""
        return self._num_failures >= self._threshold

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Wait for admission, and record the outcome of the block.

        A `ToolError` is the server's failure. A tool's own error shows that the server works. A
        cancelled call shows neither.

        Raises:
            ToolError: see `admit`.
        """
        await self.admit()
        healthy: bool | None = None
        try:
            yield
            healthy = True
        except (MCPError, ToolCallFailed):
            healthy = True
            raise
        except ToolError:
            healthy = False
            raise
        finally:
            self.settle(healthy=healthy)

    async def admit(self) -> None:
        """Return when the server may be called; the caller then must call `settle`.

        Raises:
            ToolError: the server is down, and stayed down for as long as callers wait.
        """
        deadline = time.monotonic() + self._patience
        while self.is_open:
            now = time.monotonic()
            if now >= self._retry_at and not self._probing:
                self._probing = True
                return
            if now >= deadline:
                seconds = now - self._down_since
                raise ToolError(f"{self._server} has been down for {seconds:.0f} s")
            until = deadline if self._probing else min(deadline, self._retry_at)
            try:
                async with asyncio.timeout(max(until - now, 0.001)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def settle(self, *, healthy: bool | None) -> None:
        """Record the end of a call.

        Args:
            healthy: whether the server responded, even with an error; None if unknown.
        """
        was_open = self.is_open
        self._probing = False
        if healthy:
            self._num_failures = 0
        elif healthy is False:
            now = time.monotonic()
            if not self._num_failures:
                self._down_since = now
            self._num_failures += 1
            self._retry_at = now + self._seconds
        if was_open:
            self._changed.set()
            self._changed = asyncio.Event()
