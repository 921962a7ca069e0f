"""Writes of one document or of many, cheap for one and cheap for many.

A journaled majority write costs about the same for one document as for fifty, and a sampler has
many rollouts at once: `Coalescer` lets requests that arrive while one is under way travel together
in the next. Nothing waits for company: a request that comes alone goes alone.
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
MAX_BATCH = 128

Update = tuple[Document, Document | list[Document]]
"""A filter, and what is done to the document that it matches."""


async def insert_new(collection: AsyncCollection[Document], documents: Sequence[Document]) -> int:
    """Insert the documents whose `_id` is not there yet; return how many that were.

    It may be repeated.
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
    """Update one document a filter, in any order; return how many filters matched.

    A lone update, which is what one rollout sends, goes without the driver's work for a bulk.
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
    """Runs a batch function for callers that each have one item.

    The callers themselves take turns at running it, so there is no background task to fail alone.
    A caller that is cancelled, or whose batch failed, leaves the others' items to the next; the
    batch function must therefore bear to be repeated.
    """

    def __init__(self, run: Callable[[Sequence[T]], Awaitable[Sequence[R | StoreError]]]) -> None:
        """Prepare.

        Args:
            run: handles items together; returns a result or the error for each, in order.
        """
        self._run = run
        self._lock = asyncio.Lock()
        self._waiting: dict[_Entry[T, R], None] = {}

    async def submit(self, item: T) -> R:
        """Have `item` handled, alone or in company, and return its result.

        Raises:
            StoreError: the error that `run` returned for this item.
        """
        entry: _Entry[T, R] = _Entry(item)
        self._waiting[entry] = None
        try:
            async with self._lock:
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
            # One of the others may be at fault: their own callers will find out.
            batch = [own]
            results = await self._run([own.item])
        for entry, result in zip(batch, results, strict=True):
            entry.outcome = (result,)
            self._waiting.pop(entry, None)
