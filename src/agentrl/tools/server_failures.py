"""One line that says what went wrong with a tool server."""

import asyncio
import time

from mcp import MCPError

from agentrl.errors import ToolError

_MAX_CHARS = 500


def describe(error: BaseException) -> str:
    """Say in one short line what went wrong, looking into exception groups.

    Servers word their errors, so that what terminals would act upon is taken out.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error)[: 2 * _MAX_CHARS].split())[:_MAX_CHARS]
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    if isinstance(error, MCPError) and text:
        return text
    if isinstance(error, TimeoutError) and not text:
        return "timed out"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class CircuitBreaker:
    """Counts a server's failures in a row, and holds callers back while it seems to be down.

    After `threshold` failures the circuit is open. Every `seconds`, one caller is let through to
    see whether the server is back; the others wait for what it finds, and give up after
    `patience` seconds. A success closes the circuit.
    """

    def __init__(self, what: str, *, threshold: int, seconds: float, patience: float) -> None:
        """Start with a closed circuit; `what` names the server in errors."""
        self._what = what
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
        """Whether the server is taken to be down."""
        return self._num_failures >= self._threshold

    async def admit(self) -> None:
        """Return when the server may be called; `settle` is to be called with what came of it.

        Raises:
            ToolError: the server is down, and stayed so for as long as a caller waits.
        """
        deadline = time.monotonic() + self._patience
        while self.is_open:
            now = time.monotonic()
            if now >= self._retry_at and not self._probing:
                self._probing = True
                return
            if now >= deadline:
                seconds = now - self._down_since
                raise ToolError(f"{self._what} is down, and has been for {seconds:.0f} s")
            until = deadline if self._probing else min(deadline, self._retry_at)
            try:
                async with asyncio.timeout(max(until - now, 0.001)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def settle(self, *, healthy: bool | None) -> None:
        """Take note of a call's end.

        Args:
            healthy: the server answered (whatever it said), or failed; None where neither is known.
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
