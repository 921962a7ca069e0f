"""HTTP servers: their configuration, with timeouts for incomplete requests, and how a command serves.

uvicorn waits forever for the rest of a request, and accepts headers of any length. Here a
connection is closed if the head of a request does not arrive within seconds, if its body does not
arrive within a minute, if the head is too long, or if too much is sent while an earlier request is
being answered. The duration of responses is not limited.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Collection
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 10.0
BODY_SECONDS = 75.0
"""Longer than the timeout of `request_bodies`, whose response explains the problem."""
_MAX_UNREAD_BYTES = 64 << 10


def server_config(
    app: Any, *, grace_seconds: int, lifespan: Literal["on", "off"] = "off", **options: Any
) -> uvicorn.Config:
    """Return uvicorn's configuration of a server that closes incomplete requests.

    Open connections may continue for `grace_seconds` when the server stops. `options` take precedence.
    """
    quiet = {"log_config": None, "log_level": "warning", "access_log": False}
    return uvicorn.Config(
        app,
        lifespan=lifespan,
        http=PromptProtocol,
        timeout_graceful_shutdown=grace_seconds,
        **(quiet | options),
    )


class PromptProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """One connection of a client."""

    _expected: Literal["head", "body"] | None = None
    _timer: asyncio.TimerHandle | None = None
    _num_unread_bytes = 0
    """Bytes of incomplete heads, and of requests that wait for the answer to an earlier one."""
    pipeline: Collection[Any] = ()
    """uvicorn's requests that wait for the answer to an earlier one."""

    def connection_made(self, transport: Any) -> None:
        """Expect a request."""
        super().connection_made(transport)
        self._expect("head")

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, and wait for the rest of their request."""
        before = self.cycle
        was_read = before is not None and before.more_body and not self.pipeline
        super().data_received(data)
        cycle = self.cycle
        if was_read or (cycle is not before and not self.pipeline):
            self._num_unread_bytes = 0
        else:
            self._num_unread_bytes += len(data)
            if self._num_unread_bytes > _MAX_UNREAD_BYTES:
                self.transport.close()
        # The rest of a body whose response was sent early is not the head of the next request.
        if cycle is None or (cycle.response_complete and not cycle.more_body):
            self._expect("head")
        else:
            self._expect("body" if cycle.more_body else None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._expect(None)
        super().connection_lost(exc)

    def _expect(self, part: Literal["head", "body"] | None) -> None:
        if part == self._expected:
            return
        self._expected = part
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if part is not None:
            seconds = HEAD_SECONDS if part == "head" else BODY_SECONDS
            self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        self.transport.close()


async def serve_until_signalled(
    config: uvicorn.Config, listener: socket.socket, when_ready: Callable[[], None]
) -> None:
    """Serve on `listener` until SIGINT or SIGTERM; calls `when_ready` once requests are accepted."""
    # An earlier interrupt cancels the task here rather than during the startup.
    await asyncio.sleep(0)
    # uvicorn stops on these signals and then raises them again; the exit status must be 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    await _NotifyingServer(config, when_ready).serve(sockets=[listener])


class _NotifyingServer(uvicorn.Server):
    """Calls `when_ready` once it accepts requests."""

    def __init__(self, config: uvicorn.Config, when_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_ready = when_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._when_ready()
