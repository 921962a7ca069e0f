"""Ends background tasks reliably, and raises their errors unwrapped."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

CANCEL_AGAIN_SECONDS = 3.0
"""How long a cancelled task may take to finish before it is cancelled again."""


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and return once all of them have ended; the caller may read their errors.

    Cancelling once is not enough for a task that repeats calls to the store. Up to Python 3.11,
    `asyncio.wait_for` loses a cancellation that coincides with the end of what it waits for. PyMongo
    waits for a server with it, so that the call of a cancelled task may fail like any other call
    during an outage, and the task continues.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)


@asynccontextmanager
async def joint_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a task group that raises its first error as it is, not within an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
        return
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    raise first
