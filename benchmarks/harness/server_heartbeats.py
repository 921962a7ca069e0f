"""Heartbeats of an inference server that has no supervisor, so that samplers keep using it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.schema import InferenceService, utc_now
from agentrl.store import TrajectoryStore

_INTERVAL_SECONDS = 5


@asynccontextmanager
async def kept_registered(store: TrajectoryStore, server: InferenceService) -> AsyncIterator[None]:
    """Register a server and send its heartbeats until the context ends."""

    async def beat() -> None:
        while True:
            await store.services.register(server.model_copy(update={"heartbeat_at": utc_now()}))
            await asyncio.sleep(_INTERVAL_SECONDS)

    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()
        await asyncio.wait([beats])
