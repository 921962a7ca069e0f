"""Ends background tasks for certain, even if a library loses a cancellation."""

import asyncio
from collections.abc import Collection
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
