"""A server of a command, which Ctrl-C ends at any moment."""

import asyncio
import socket
from collections.abc import MutableMapping
from typing import Any

import pytest
import uvicorn

from agentrl.runtime.http.signalled_server import serve_until_signalled


async def test_an_interrupt_before_the_start_starts_nothing() -> None:
    begun = []

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        begun.append(scope["type"])
        await receive()

    async def interrupted(listener: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as `asyncio.run` does on Ctrl-C
        config = uvicorn.Config(app, lifespan="on")
        await serve_until_signalled(config, listener, lambda: begun.append("ready"))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(interrupted(listener))
        await asyncio.sleep(0)
    assert begun == []
