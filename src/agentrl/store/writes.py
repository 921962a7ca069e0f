"""Batched writes that cost nothing extra for a single document.

A journaled majority write takes about as long for one document as for fifty, and a sampler runs many
rollouts at once. `Coalescer` sends the requests that arrive during one write together in the next. No
request is delayed for batching: a lone request is sent at once. Knows no collection by name.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from bson.errors import BSONError
from pymongo import UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import AutoReconnect, BulkWriteError, DuplicateKeyError, PyMongoError

from agentrl.errors import StoreError
from agentrl.store.documents.codec import Document

T = TypeVar("T")
R = TypeVar("R")

DUPLICATE_KEY = 11000
"""Error code of the server."""
MAX_BATCH = 128
"""Most items in one batch."""

Update = tuple[Document, Document | list[Document]]
"""A filter, and the update of the document that it matches."""


async def insert_new(collection: AsyncCollection[Document], documents: Sequence[Document]) -> int:
    """Insert the documents whose `_id` does not exist yet; return their number.

    Idempotent: repeating it after a lost reply inserts nothing twice.
    """
    if not documents:
        return 0
    try:
        if len(documents) == 1:
            await collection.insert_one(documents[0])
        else:
            await collection.insert_many(documents, ordered=False)
    except DuplicateKeyError:
        return 0
    except BulkWriteError as error:
        details = error.details or {}
        if any(e["code"] != DUPLICATE_KEY for e in details.get("writeErrors", ())):
            raise
        if details.get("writeConcernErrors"):
            raise
        return int(details["nInserted"])
    return len(documents)


async def update_each(collection: AsyncCollection[Document], updates: Sequence[Update]) -> int:
    """Update one document per filter, in any order; return the number of filters that matched.

    A single update skips the driver's overhead of bulk writes.
    """
    if len(updates) == 1:
        return (await collection.update_one(*updates[0])).matched_count
    requests = [UpdateOne(wanted, change) for wanted, change in updates]
    return (await collection.bulk_write(requests, ordered=False)).matched_count


@dataclass(eq=False)
class _Entry(Generic[T, R]):
    item: T
    outcome: tuple[R | StoreError] | None = None


class Coalescer(Generic[T, R]):
    """Runs a batch function for callers that have one item each.

    One of the callers runs each batch, so there is no background task whose failure could go
    unnoticed. If that caller is cancelled or the batch fails, the next caller runs the other items
    again; the batch function must therefore be idempotent.
    """

    def __init__(self, run: Callable[[Sequence[T]], Awaitable[Sequence[R | StoreError]]]) -> None:
        """Begin without waiting items.

        Args:
            run: processes a batch; returns a result or an error for each item, in order.
        """
        self._run = run
        self._lock = asyncio.Lock()
        self._waiting: dict[_Entry[T, R], None] = {}

    async def submit(self, item: T) -> R:
        """Process `item`, possibly in a batch with others, and return its result.

        Raises:
            StoreError: the error that `run` returned for this item.
        """
        entry: _Entry[T, R] = _Entry(item)
        self._waiting[entry] = None
        try:
            async with self._lock:
                # An earlier batch may have included this item while it waited for the lock.
                if entry.outcome is None:
                    await self._run_batch(entry)
        finally:
            self._waiting.pop(entry, None)
        assert entry.outcome is not None
        (result,) = entry.outcome
        if isinstance(result, StoreError):
            raise result
        return result

    async def _run_batch(self, own: _Entry[T, R]) -> None:
        others = [entry for entry in self._waiting if entry is not own]
        batch = [own, *others[: MAX_BATCH - 1]]
        try:
            results = await self._run([entry.item for entry in batch])
        except AutoReconnect:
            raise
        except (PyMongoError, BSONError):
            # Another item may be at fault; its caller will get the error.
            batch = [own]
            results = await self._run([own.item])
        for entry, result in zip(batch, results, strict=True):
            entry.outcome = (result,)
            self._waiting.pop(entry, None)
