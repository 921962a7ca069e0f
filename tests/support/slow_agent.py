"""Agents that take their time."""

import asyncio
import os
from typing import Any

_cancelled: list[str] = []
_running: list[str] = []


async def slow_agent(task: Any, endpoint: Any) -> str:
    """Wait to be cancelled, unless the task is quick or asks how often that happened."""
    if task.query == "quick":
        return "quick"
    if task.query == "cancelled?":
        return str(len(_cancelled))
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        _cancelled.append(task.query)
        raise
    return "late"


async def counting_agent(task: Any, endpoint: Any) -> str:
    """Return how many of these ran at the same time."""
    _running.append(task.query)
    await asyncio.sleep(0.02)
    most = len(_running)
    _running.pop()
    return str(most)


async def process_agent(task: Any, endpoint: Any) -> str:
    """Return the number of the process that played."""
    return str(os.getpid())
