"""Batched writes without extra cost for a single document.

A journaled majority write takes about as long for one document as for fifty, and a sampler runs
many rollouts concurrently. `Coalescer` collects the requests that arrive during one write and sends
them together in the next. A single request is sent immediately, unless its caller allows a wait.
This module is independent of the collections.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bson.errors import BSONError
from pymongo import ReplaceOne, UpdateOne
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import BulkWriteError, DuplicateKeyError, PyMongoError

from agentrl.errors import StoreError
from agentrl.store.database import is_passing
from agentrl.store.documents.codec import Document

T = TypeVar("T")
R = TypeVar("R")

DUPLICATE_KEY = 11000
"""Error code of the server."""
MAX_BATCH = 128
"""Most items in a batch, unless more items arrived before the caller's own."""

Update = tuple[Document, Document | list[Document]]
"""A filter, and the update of the matching document."""


async def insert_new(
    collection: AsyncCollection[Document],
    documents: Sequence[Document],
    *,
    bypass_validator: bool = False,
) -> int:
    """Insert the documents whose `_id` does not exist yet; return their number.

    Idempotent: repeating it after a lost reply inserts nothing twice. `bypass_validator` saves the
    server the validation of documents that were just created from schema values.
    """
    if not documents:
        return 0
    try:
        if len(documents) == 1:
            await collection.insert_one(documents[0], bypass_validator)
        else:
            await collection.insert_many(documents, False, bypass_validator)
    except DuplicateKeyError:
        return 0
    except BulkWriteError as error:
        return int(_raise_unless_duplicates(error)["nInserted"])
    return len(documents)


async def insert_until_taken(
    collection: AsyncCollection[Document],
    documents: Sequence[Document],
    *,
    bypass_validator: bool = False,
) -> tuple[int, str | None]:
    """Insert documents in order, up to the first whose value of a unique field already exists.

    For `bypass_validator`, see `insert_new`.

    Returns:
        The number of documents inserted, and the name of that field (None if all were inserted).
    """
    try:
        await collection.insert_many(documents, True, bypass_validator)
    except BulkWriteError as error:
        [duplicate] = _raise_unless_duplicates(error)["writeErrors"]
        return int(duplicate["index"]), next(iter(duplicate["keyPattern"]))
    return len(documents), None


async def insert_and_update(
    collection: AsyncCollection[Document],
    documents: Sequence[Document],
    updates: Sequence[Update],
) -> None:
    """Insert new documents and update others in one request; idempotent like `insert_new`.

    An existing document may be replaced, so it must be unchanged since its insertion.
    """
    if not updates:
        await insert_new(collection, documents)
        return
    # Upserts, because the server takes insertions and updates in separate requests.
    requests: list[ReplaceOne[Document] | UpdateOne] = [
        ReplaceOne({"_id": document["_id"]}, document, upsert=True) for document in documents
    ]
    requests += [UpdateOne(wanted, change) for wanted, change in updates]
    try:
        await collection.bulk_write(requests, ordered=False)
    except BulkWriteError as error:
        _raise_unless_duplicates(error)


async def update_each(collection: AsyncCollection[Document], updates: Sequence[Update]) -> int:
    """Update one document per filter, in any order; return the number of filters that matched.

    A single update skips the driver's overhead of bulk writes.
    """
    if len(updates) == 1:
        return (await collection.update_one(*updates[0])).matched_count
    if not updates:
        return 0
    requests = [UpdateOne(wanted, change) for wanted, change in updates]
    return (await collection.bulk_write(requests, ordered=False)).matched_count


async def run_side_by_side(writes: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run writes concurrently; none outlives the call, even if one fails or the caller is cancelled.

    Raises:
        Exception: the error of the first write that failed.
    """
    running = [asyncio.create_task(write) for write in writes]
    try:
        await asyncio.gather(*running)
    finally:
        for write in running:
            write.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _raise_unless_duplicates(error: BulkWriteError) -> Document:
    """Return the details of an error that reports only duplicates; raise any other error."""
    details: Document = dict(error.details or {})
    if any(e["code"] != DUPLICATE_KEY for e in details.get("writeErrors", ())):
        raise error
    if details.get("writeConcernErrors"):
        raise error
    return details


@dataclass(eq=False)
class _Entry(Generic[T, R]):
    item: T
    outcome: asyncio.Future[R | StoreError]


class Coalescer(Generic[T, R]):
    """Runs a batch function for callers that have one item each.

    One of the callers runs each batch, so there is no background task whose failure could go
    unnoticed. If that caller is cancelled or the batch fails, the next caller runs the other items
    again; the batch function must therefore be idempotent. A batch holds items in order of arrival,
    including all that arrived before the caller's own, because later items may depend on earlier
    ones.
    """

    def __init__(self, run: Callable[[Sequence[T]], Awaitable[Sequence[R | StoreError]]]) -> None:
        """Create a coalescer.

        Args:
            run: processes a batch; returns a result or an error for each item, in order.
        """
        self._run = run
        self._lock = asyncio.Lock()
        self._waiting: dict[_Entry[T, R], None] = {}

    async def submit(self, item: T, *, wait_seconds: float = 0.0) -> R:
        """Process `item`, possibly in a batch with others, and return its result.

        Args:
            item: what to process.
            wait_seconds: how long it may wait for another caller's batch before starting its own.

        Raises:
            StoreError: the error that `run` returned for this item.
        """
        entry: _Entry[T, R] = _Entry(item, asyncio.get_running_loop().create_future())
        self._waiting[entry] = None
        try:
            if wait_seconds:
                await asyncio.wait([entry.outcome], timeout=wait_seconds)
            async with self._lock:
                # An earlier batch may have included this item while it waited for the lock.
                if not entry.outcome.done():
                    await self._run_batch(entry)
        finally:
            self._waiting.pop(entry, None)
        result = entry.outcome.result()
        if isinstance(result, StoreError):
            raise result
        return result

    async def _run_batch(self, own: _Entry[T, R]) -> None:
        waiting = list(self._waiting)
        batch = waiting[: max(MAX_BATCH, waiting.index(own) + 1)]
        try:
            results = await self._run([entry.item for entry in batch])
        except (PyMongoError, BSONError) as error:
            if is_passing(error):
                raise
            # Another item may be at fault; its caller will get the error.
            batch = [own]
            results = await self._run([own.item])
        for entry, result in zip(batch, results, strict=True):
            entry.outcome.set_result(result)
            self._waiting.pop(entry, None)
