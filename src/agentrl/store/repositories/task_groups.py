"""Tasks and their groups of Records: added once, completed exactly once.

A Task is stored together with its `num_generations` Records. The process that ends the last of them
completes the group; `reap` completes groups whose process crashed in between. In a group that
branches, Records of later rounds are stored as `planned`; the process that ends the last Record of a
round makes those of the next one `pending`, and `reap` repairs that as well.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TypeVar

from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import OperationFailure

from agentrl.runtime.processes.process_identity import is_dead
from agentrl.schema import (
    RECORD_TRANSITIONS,
    TERMINAL_STATUSES,
    MCPTask,
    Record,
    Split,
    Task,
)
from agentrl.schema.image import image_from_data_url
from agentrl.schema.task import TaskStatus
from agentrl.store.database import UNAUTHORIZED, Repository, RunDatabase, operation
from agentrl.store.documents.codec import (
    Document,
    encode,
    from_document,
    record_data,
    record_to_document,
    require,
    task_from_document,
    task_version,
    to_document,
    without_none,
)
from agentrl.store.documents.expressions import (
    attempt_failed,
    held,
    shown,
)
from agentrl.store.repositories.blobs import ImageRepository
from agentrl.store.writes import insert_new, insert_until_taken, run_side_by_side

T = TypeVar("T")
_Prepared = tuple[Task, Document]

TERMINAL: Document = {"$in": sorted(TERMINAL_STATUSES)}
UNFINISHED = sorted(set(RECORD_TRANSITIONS) - TERMINAL_STATUSES)
REAP_BATCH = 256
BATCH_DOCUMENTS, _BATCH_CHARS = 10_000, 1 << 24
"""Limits of a batch: each batch waits for the journal about five times, and memory holds two of
them. Images are part of the tasks until they are stored."""
_SLOT_REQUESTS = 2
"""Concurrent requests that insert slots: the server uses one core for each."""
KNOWN_TASKS, TASKS_AHEAD = 256, 32
"""Tasks cached for claims, and the number of following ones that are prefetched with one."""
_SLOT_COLUMNS = shown("num_generations", "rounds", "split", "order", "created_at")
_EMPTY_SLOT = record_to_document(Record(id="", task_id="", split="train", traj_id=0, order=0))
"""Fields shared by all pending Records; created once, because a run may have millions."""


@dataclass
class _StoredTasks:
    """Tasks in the database whose slots may be missing."""

    tasks: list[Document]
    num_new: int = 0


class TaskRepository(Repository):
    """Adds and reads Tasks."""

    def __init__(self, database: RunDatabase, images: ImageRepository) -> None:
        super().__init__(database)
        self._images = images
        self._may_bypass = True
        self._known: dict[str, Document] = {}
        self._read_lock = asyncio.Lock()

    async def add(
        self, tasks: Iterable[Task] | AsyncIterable[Task], max_documents: int = BATCH_DOCUMENTS
    ) -> int:
        """Store tasks together with `num_generations` Records each.

        A new training task gets the next `order` of the run. Orders are unique and without gaps,
        even if several processes add tasks concurrently. Other tasks keep their orders. A plain
        iterable is read in a thread, so that reading does not block the event loop. Idempotent:
        existing tasks stay unchanged, and missing Records (after a crash) are added.

        Args:
            tasks: the tasks, which are stored in this order.
            max_documents: most Tasks and Records that are written together.

        Returns:
            The number of tasks that were new.
        """
        num_new = 0
        # A pipeline of three batches: the slots of the first are written while the tasks of the
        # second are written and the third is read and converted to documents.
        stored = _prefetched(
            self._stored_batches(_prefetched(_prepared_batches(tasks, max_documents)))
        )
        async with aclosing(stored) as batches:
            async for batch in batches:
                await self._add_slots(batch)
                num_new += batch.num_new
        return num_new

    async def _stored_batches(
        self, batches: AsyncGenerator[list[_Prepared]]
    ) -> AsyncGenerator[_StoredTasks]:
        async with aclosing(batches):
            async for prepared in batches:
                yield await self._add_tasks(prepared)

    @operation("add tasks")
    async def _add_tasks(self, given: list[_Prepared]) -> _StoredTasks:
        """Insert the tasks that do not exist yet."""
        ids = [document["_id"] for _, document in given]
        known = self._db.tasks.find({"_id": {"$in": ids}}, _SLOT_COLUMNS)
        # Existing tasks may differ from the given ones in number of slots and order.
        existing = {task["_id"]: task async for task in known}
        new = [
            await self._with_stored_images(task, document)
            for task, document in given
            if document["_id"] not in existing
        ]
        batch = _StoredTasks(await self._with_missing_slots(existing))
        await self._insert(new, batch)
        return batch

    async def _insert(self, new: list[Document], batch: _StoredTasks) -> None:
        """Insert tasks that did not exist a moment ago."""
        while new:
            training = [task for task in new if task["split"] == "train"]
            if training:
                for order, task in enumerate(training, await self._next_train_order()):
                    task["order"] = order
            num_inserted, taken = await self._bulk(insert_until_taken, self._db.tasks, new)
            batch.tasks += new[:num_inserted]
            batch.num_new += num_inserted
            # The insertion stopped at a task that another process has added (skip it), or whose order
            # another process has taken (try again).
            new = new[num_inserted + (taken == "_id") :]

    @operation("add the slots of tasks")
    async def _add_slots(self, batch: _StoredTasks) -> None:
        """Insert the missing slots of stored tasks.

        Runs after the tasks are stored, so that a claimed slot always has its Task.
        """
        slots = await asyncio.to_thread(_slots, batch.tasks)
        shares = [slots[first::_SLOT_REQUESTS] for first in range(_SLOT_REQUESTS)]
        await run_side_by_side(self._bulk(insert_new, self._db.records, share) for share in shares)

    async def _bulk(
        self,
        insert: Callable[..., Awaitable[T]],
        collection: AsyncCollection[Document],
        documents: Sequence[Document],
    ) -> T:
        """Insert many documents of schema values, bypassing the validator if the login may."""
        if self._may_bypass:
            try:
                return await insert(collection, documents, bypass_validator=True)
            except OperationFailure as error:
                if error.code != UNAUTHORIZED:
                    raise
                self._may_bypass = False  # the login has readWrite without dbAdmin
        return await insert(collection, documents)

    async def _with_missing_slots(self, existing: Mapping[str, Document]) -> list[Document]:
        """Return the tasks with missing slots, whose addition was interrupted by a crash."""
        wanted = {"task_id": {"$in": list(existing)}}
        num_slots = await self._db.records.count_documents(wanted) if existing else 0
        if num_slots == sum(task["num_generations"] for task in existing.values()):
            return []
        return list(existing.values())

    async def _with_stored_images(self, task: Task, document: Document) -> Document:
        """Store the images of a task, and return its document with their addresses instead."""
        if not (isinstance(task, MCPTask) and task.images):
            return document
        data_urls = [url for url in task.images if url.startswith("data:")]
        stored = await self._images.put([image_from_data_url(url) for url in data_urls])
        addresses = dict(zip(data_urls, stored, strict=True))
        return {**document, "images": [addresses.get(url, url) for url in task.images]}

    @operation("read the next order")
    async def next_train_order(self) -> int:
        """Return the order of the next training Task: one above the highest, or 0."""
        return await self._next_train_order()

    async def _next_train_order(self) -> int:
        last = await self._db.tasks.find_one({"split": "train"}, {"order": 1}, sort=[("order", -1)])
        return 0 if last is None else int(last["order"]) + 1

    @operation("read the last tasks")
    async def last(self, limit: int) -> list[Task]:
        """Return the training Tasks of the highest orders, the last one first."""
        cursor = self._db.tasks.find({"split": "train"}).sort([("order", -1), ("_id", -1)])
        return [task_from_document(document) async for document in cursor.limit(limit)]

    @operation("read the first open order")
    async def first_open_order(self) -> int | None:
        """Return the order of the first incomplete training Task, or None if all are complete."""
        task = await self._db.tasks.find_one(
            {"split": "train", "status": "created"}, {"order": 1}, sort=[("order", 1)]
        )
        return None if task is None else int(task["order"])

    @operation("read a task")
    async def get(self, task_id: str) -> Task | None:
        """Return the Task with this id, or None."""
        document = await self._db.tasks.find_one({"_id": task_id})
        return None if document is None else task_from_document(document)

    @operation("read tasks")
    async def get_many(self, task_ids: Sequence[str]) -> list[Task]:
        """Return the existing Tasks among these ids, in no particular order."""
        cursor = self._db.tasks.find({"_id": {"$in": [encode(task_id) for task_id in task_ids]}})
        return [task_from_document(document) async for document in cursor]

    @operation("count tasks")
    async def count(
        self,
        *,
        split: Split | None = None,
        tag: str | None = None,
        status: TaskStatus | None = None,
    ) -> int:
        """Return the number of matching tasks."""
        return await self._db.tasks.count_documents(
            without_none(split=split, tag=tag, status=status)
        )

    async def find(
        self,
        *,
        split: Split | None = None,
        tag: str | None = None,
        status: TaskStatus | None = None,
    ) -> AsyncIterator[Task]:
        """Yield the matching tasks by `order`."""
        async with self._db.boundary("read tasks"):
            cursor = self._db.tasks.find(without_none(split=split, tag=tag, status=status))
            async for document in cursor.sort("order", 1):
                yield task_from_document(document)

    @operation("read the scorers")
    async def open_scorers(self, splits: Collection[Split] | None = None) -> list[str]:
        """Return the names of the scorers of incomplete tasks, sorted."""
        wanted: Document = {"status": "created"}
        if splits is not None:
            wanted["split"] = {"$in": list(splits)}
        return sorted(await self._db.tasks.distinct("scorer", wanted))

    @operation("read the environments")
    async def open_environments(self) -> list[str]:
        """Return the environments of incomplete tasks as `KIND:NAME`, sorted."""
        return sorted(await self._db.tasks.distinct("env_id", {"status": "created"}))

    async def of_claimed(self, record: Record) -> Task:
        """Return the Task of a claimed Record; claims of the same group share one read."""
        if record.task_id not in self._known:
            # Concurrent claims miss the same Tasks; one read serves them all.
            async with self._read_lock:
                if record.task_id not in self._known:
                    await self._read_ahead(record)
        return task_from_document(self._known[record.task_id])

    async def _read_ahead(self, record: Record) -> None:
        """Read the Record's Task and, in training, the Tasks that follow it.

        If several processes share the groups, each sees a new Task at almost every claim; one read
        per claim would raise the cost of claiming by half.
        """
        if record.split == "train":
            following = {"split": record.split, "order": {"$gte": record.order}}
            found = self._db.tasks.find(following).sort("order", 1).limit(TASKS_AHEAD)
            self._known.update({task["_id"]: task async for task in found})
        if record.task_id not in self._known:
            document = await self._db.tasks.find_one({"_id": record.task_id})
            self._known[record.task_id] = require(document, f"task {record.task_id!r}")
        while len(self._known) > KNOWN_TASKS:
            self._known.pop(next(iter(self._known)))


@dataclass(frozen=True, kw_only=True)
class ReapCounts:
    """The repairs of one call of `reap`."""

    num_expired: int
    """Attempts that ended because their lease expired."""
    num_groups_completed: int
    """Groups whose Records had all ended without the group being completed."""


class GroupRepository(Repository):
    """Completes groups, and repairs them after crashes."""

    async def complete(self, task_ids: Collection[str]) -> set[str]:
        """Complete the groups whose Records are all scored or failed; begin rounds of the others.

        Runs inside the operation that ended a Record. Every step is idempotent and safe under
        concurrency, so calling again repairs a crash between two steps.

        Returns:
            The ids of the tasks that this call completed; each id is returned to exactly one
            caller.
        """
        if not task_ids:
            return set()
        unfinished = await self._db.records.distinct(
            "task_id", {"task_id": {"$in": sorted(task_ids)}, "status": {"$in": UNFINISHED}}
        )
        # An ended Record stays ended, so this result cannot become stale. Two processes that end
        # the last two Records concurrently may both get here; `_complete` decides between them.
        ended = set(task_ids) - set(unfinished)
        await self._begin_rounds(unfinished)
        return {task_id for task_id in sorted(ended) if await self._complete(task_id)}

    async def _begin_rounds(self, task_ids: Collection[str]) -> None:
        """Make the slots of a round claimable if all Records of the rounds before it have ended."""
        if not task_ids:
            return
        planned = {"task_id": {"$in": sorted(task_ids)}, "status": "planned"}
        for task_id in await self._db.records.distinct("task_id", planned):
            unfinished = {"task_id": task_id, "status": {"$in": UNFINISHED}}
            rounds = await self._db.records.distinct("round", unfinished)
            # The rounds before this one stay ended, and a slot that is not planned is left alone:
            # the write may come late, twice, or after a crash in the middle of it.
            await self._db.records.update_many(
                {"task_id": task_id, "round": min(rounds, default=0), "status": "planned"},
                {"$set": {"status": "pending"}},
            )

    async def _complete(self, task_id: str) -> bool:
        cursor = self._db.records.find({"task_id": task_id})
        records = [from_document(Record, document) async for document in cursor]
        task = await self._db.tasks.find_one({"_id": task_id})
        if task is None or task["num_generations"] != len(records):
            return False  # its slots are still being added
        version = task_version(task)
        await insert_new(
            self._db.record_data,
            [to_document(record_data(record, version)) for record in records],
        )
        # This write decides which process completed the group: its filter matches only once.
        result = await self._db.tasks.update_one(
            {"_id": task_id, "status": "created"},
            {"$set": {"status": "completed"}, "$currentDate": {"completed_at": True}},
        )
        await self._db.record_data.update_many(
            {"task_id": task_id, "group_completed": False}, {"$set": {"group_completed": True}}
        )
        # Last, because reapers look for open records: a crash before this line is repaired later.
        await self._db.records.update_many(
            {"task_id": task_id, "group_open": True}, {"$unset": {"group_open": ""}}
        )
        return result.modified_count == 1

    @operation("reap")
    async def reap(self, max_attempts: int, *, lease_seconds: float) -> ReapCounts:
        """Take back expired leases, and complete groups whose completion a crash interrupted.

        Any number of processes may call it concurrently.

        Args:
            max_attempts: attempts after which an expired slot is failed instead.
            lease_seconds: how long the run's leases last without renewal.
        """
        num_expired = await self.reap_expired(max_attempts, lease_seconds)
        num_groups_completed = await self._reap_open_groups()
        return ReapCounts(num_expired=num_expired, num_groups_completed=num_groups_completed)

    async def reap_expired(self, max_attempts: int, lease_seconds: float) -> int:
        """End the attempts whose lease expired; runs inside another operation.

        Returns:
            The number of attempts that this call ended.
        """
        now = await self._db.server_time()
        is_settled = self._db.clock.is_settled(lease_seconds)
        expired = self._db.records.find(
            {"status": "running", "lease.expires_at": {"$lt": now}}, {"task_id": 1, "lease": 1}
        )
        return sum(
            [
                await self._end_expired(found, max_attempts)
                for found in await expired.limit(REAP_BATCH).to_list()
                if is_settled or is_dead(found["lease"]["owner"])
            ]
        )

    async def _end_expired(self, found: Document, max_attempts: int) -> int:
        lease = found["lease"]
        result = await self._db.records.update_one(
            {
                **held(found["_id"], lease["fence"]),
                "lease.expires_at": lease["expires_at"],  # its holder may have renewed it since
                "status": "running",
            },
            attempt_failed("expired", f"the lease of {lease['owner']} expired", max_attempts),
        )
        if result.modified_count:
            self._db.leases.forget(found["_id"])
            await self.complete({found["task_id"]})
        return result.modified_count

    async def _reap_open_groups(self) -> int:
        task_ids = await self._db.records.distinct(
            "task_id", {"group_open": True, "status": TERMINAL}
        )
        return len(await self.complete(task_ids))


def _with_documents(tasks: Iterable[Task]) -> list[_Prepared]:
    return [(task, to_document(task)) for task in tasks]


def _slots(tasks: Sequence[Document]) -> list[Document]:
    """Return the unclaimed Records of stored Tasks."""
    # `group_open` is internal to the store: it indexes the groups that must still be completed.
    return [
        {
            **_EMPTY_SLOT,
            "_id": f"{task['_id']}/{number}",
            "task_id": task["_id"],
            "split": task["split"],
            "traj_id": number,
            "round": round_number,
            "status": "planned" if round_number else "pending",
            "order": task["order"],
            "created_at": task["created_at"],
            "group_open": True,
        }
        for task in tasks
        for number, round_number in enumerate(_round_of_each(task))
    ]


def _round_of_each(task: Document) -> Iterator[int]:
    """Yield the round of each slot of a stored Task."""
    sizes = task.get("rounds") or [task["num_generations"]]
    return chain.from_iterable(repeat(number, size) for number, size in enumerate(sizes))


def next_batch(tasks: Iterator[Task], max_documents: int = BATCH_DOCUMENTS) -> list[Task]:
    """Take the next tasks to store together; an empty list if none are left."""
    batch: list[Task] = []
    filled = 0.0
    while filled < 1 and (task := next(tasks, None)) is not None:
        batch.append(task)
        filled += _share_of_batch(task, max_documents)
    return batch


def _share_of_batch(task: Task, max_documents: int) -> float:
    num_chars = 0
    if isinstance(task, MCPTask):
        num_chars = len(task.query) + len(task.system_prompt) + sum(map(len, task.images))
    return max((1 + task.num_generations) / max_documents, num_chars / _BATCH_CHARS)


async def _batches(
    tasks: Iterable[Task] | AsyncIterable[Task], max_documents: int
) -> AsyncGenerator[list[Task]]:
    if isinstance(tasks, AsyncIterable):
        batch: list[Task] = []
        filled = 0.0
        async for task in tasks:
            batch.append(task)
            filled += _share_of_batch(task, max_documents)
            if filled >= 1:
                yield batch
                batch, filled = [], 0.0
        if batch:
            yield batch
        return
    remaining = iter(tasks)
    # In a thread, because a question file may take long to read and the caller must renew leases.
    while batch := await asyncio.to_thread(next_batch, remaining, max_documents):
        yield batch


async def _prepared_batches(
    tasks: Iterable[Task] | AsyncIterable[Task], max_documents: int
) -> AsyncGenerator[list[_Prepared]]:
    async with aclosing(_batches(tasks, max_documents)) as batches:
        async for batch in batches:
            yield await asyncio.to_thread(_with_documents, batch)


async def _prefetched(items: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """Yield the items; each is produced while its predecessor is processed."""
    async with aclosing(items):
        next_item = asyncio.ensure_future(anext(items, None))
        try:
            while (item := await next_item) is not None:
                next_item = asyncio.ensure_future(anext(items, None))
                yield item
        finally:
            next_item.cancel()
            await asyncio.gather(next_item, return_exceptions=True)
