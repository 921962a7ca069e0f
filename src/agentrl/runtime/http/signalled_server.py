"""`serve_until_signalled`: an HTTP server of a command that runs until Ctrl-C.

Input: uvicorn's configuration and a listening socket. Output: nothing; a callback reports when it
accepts requests.
"""

import asyncio
import signal
import socket
from collections.abc import Callable

import uvicorn


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
