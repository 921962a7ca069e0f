"""Repeats what may fail for a moment."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")


async def retried(
    attempt: Callable[[], Awaitable[_T]],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    pauses: Iterable[float],
) -> _T:
    """Return what an attempt returns; after an error `on`, repeat it as often as there are pauses."""
    for pause in pauses:
        try:
            return await attempt()
        except on:
            await asyncio.sleep(pause)
    return await attempt()
