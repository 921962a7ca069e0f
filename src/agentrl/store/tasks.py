"""Tasks and the pending Records (slots) that belong to them."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from agentrl.schema import MCPTask, Record, RecordStatus, Split, Task
from agentrl.schema.image import image_from_data_url
from agentrl.schema.task import TaskStatus
from agentrl.store.codec import (
    Document,
    encode,
    from_document,
    record_to_document,
    task_from_document,
    to_document,
)
from agentrl.store.door import boundary, operation
from agentrl.store.images import ImageDoor
from agentrl.store.writes import insert_new


class TaskDoor(ImageDoor):
    """Pushes and reads tasks."""

    async def add_tasks(
        self, tasks: Iterable[Task] | AsyncIterable[Task], batch_size: int = 500
    ) -> int:
        """Store tasks together with `num_generations` pending Records each.

        A plain iterable is read in a thread, so that reading does not hold up the event loop.
        Tasks that are there already are left as they are, and Records that a crash kept from being
        written are added: calling it again with the same tasks repairs and changes nothing else.

        Returns:
            The number of tasks that were new.
        """
        num_new = 0
        async for batch in _batches(tasks, batch_size):
            num_new += await self._add_batch(batch)
        return num_new

    @operation("add tasks")
    async def _add_batch(self, tasks: list[Task]) -> int:
        tasks = [await self._with_stored_images(task) for task in tasks]
        # Tasks first: a slot that can be claimed always finds its Task.
        num_new = await insert_new(self._tasks, [to_document(task) for task in tasks])
        if num_new < len(tasks):
            # Those that were there say themselves how many slots they have, and where.
            tasks = await self._tasks_of([task.id for task in tasks])
        await insert_new(self._records, [slot for task in tasks for slot in _slots(task)])
        return num_new

    async def _with_stored_images(self, task: Task) -> Task:
        """Return the task with addresses in place of the images that it brings along."""
        if not (isinstance(task, MCPTask) and task.images):
            return task
        brought = [url for url in task.images if url.startswith("data:")]
        stored = await self.put_images([image_from_data_url(url) for url in brought])
        addresses = dict(zip(brought, stored, strict=True))
        return task.model_copy(
            update={"images": tuple(addresses.get(url, url) for url in task.images)}
        )

    @operation("read the next order")
    async def next_train_order(self) -> int:
        """Return the order that the next training Task gets: one above the highest, or 0."""
        last = await self._tasks.find_one({"split": "train"}, {"order": 1}, sort=[("order", -1)])
        return 0 if last is None else int(last["order"]) + 1

    @operation("read the first open order")
    async def first_open_order(self) -> int | None:
        """Return the order of the first training Task that is not complete; None when all are."""
        task = await self._tasks.find_one(
            {"split": "train", "status": "created"}, {"order": 1}, sort=[("order", 1)]
        )
        return None if task is None else int(task["order"])

    @operation("read a task")
    async def task(self, task_id: str) -> Task | None:
        """Return the Task, None when there is none of that id."""
        document = await self._tasks.find_one({"_id": task_id})
        return None if document is None else task_from_document(document)

    @operation("read tasks")
    async def tasks_of(self, task_ids: Sequence[str]) -> list[Task]:
        """Return the Tasks of these ids that there are, in no particular order."""
        return await self._tasks_of(task_ids)

    async def _tasks_of(self, task_ids: Sequence[str]) -> list[Task]:
        ids = [encode(task_id) for task_id in task_ids]
        cursor = self._tasks.find({"_id": {"$in": ids}})
        return [task_from_document(document) async for document in cursor]

    @operation("count tasks")
    async def count_tasks(
        self,
        *,
        split: Split | None = None,
        tag: str | None = None,
        status: TaskStatus | None = None,
    ) -> int:
        """Return the number of tasks that fit."""
        return await self._tasks.count_documents(_only(split=split, tag=tag, status=status))

    @operation("read the scorers")
    async def open_scorers(self, splits: Collection[Split] | None = None) -> list[str]:
        """Return the names of the scorers that tasks still to be completed want, sorted."""
        wanted: Document = {"status": "created"}
        if splits is not None:
            wanted["split"] = {"$in": list(splits)}
        return sorted(await self._tasks.distinct("scorer", wanted))

    async def iter_tasks(
        self,
        *,
        split: Split | None = None,
        tag: str | None = None,
        status: TaskStatus | None = None,
    ) -> AsyncIterator[Task]:
        """Yield the tasks that fit, in their order."""
        async with boundary("read tasks", self._uri):
            cursor = self._tasks.find(_only(split=split, tag=tag, status=status))
            async for document in cursor.sort("order", 1):
                yield task_from_document(document)

    @operation("read a record")
    async def record(self, record_id: str) -> Record | None:
        """Return the Record, None when there is none of that id."""
        document = await self._records.find_one({"_id": record_id})
        return None if document is None else from_document(Record, document)

    @operation("read a group")
    async def records_of(self, task_id: str) -> list[Record]:
        """Return the Records of a Task, in order of `traj_id`."""
        cursor = self._records.find({"task_id": task_id}).sort("traj_id", 1)
        return [from_document(Record, document) async for document in cursor]

    async def iter_records(
        self, *, status: RecordStatus | None = None, split: Split | None = None
    ) -> AsyncIterator[Record]:
        """Yield the Records that fit, by order and `traj_id`."""
        async with boundary("read records", self._uri):
            cursor = self._records.find(_only(status=status, split=split))
            async for document in cursor.sort([("order", 1), ("traj_id", 1)]):
                yield from_document(Record, document)

    @operation("read scores")
    async def group_scores(self, task_id: str) -> list[float | None]:
        """Return the scores of a Task's Records by `traj_id`; None where there is none (yet)."""
        return (await self._scores([task_id])).get(task_id, [])

    @operation("read scores")
    async def tag_scores(self, tag: str) -> dict[str, list[float | None]]:
        """Return the scores of all tasks under a tag: task id -> scores by `traj_id`."""
        ids = [task["_id"] async for task in self._tasks.find({"tag": tag}, {"_id": 1})]
        return await self._scores(ids)

    async def _scores(self, task_ids: list[str]) -> dict[str, list[float | None]]:
        scores: dict[str, list[float | None]] = {}
        cursor = self._records.find(
            {"task_id": {"$in": task_ids}}, {"task_id": 1, "traj_id": 1, "score.value": 1}
        )
        documents = [document async for document in cursor]
        for document in sorted(documents, key=lambda d: (d["task_id"], d["traj_id"])):
            score = document.get("score")
            scores.setdefault(document["task_id"], []).append(score["value"] if score else None)
        return scores


def _slots(task: Task) -> list[Document]:
    slots = []
    for traj_id in range(task.num_generations):
        record = Record(
            id=f"{task.id}/{traj_id}",
            task_id=task.id,
            split=task.split,
            traj_id=traj_id,
            order=task.order,
        )
        # `group_open` is the store's own: the index of groups that still have to be completed.
        slots.append({**record_to_document(record), "group_open": True})
    return slots


def _only(**conditions: Any) -> Document:
    return {field: value for field, value in conditions.items() if value is not None}


async def _batches(
    tasks: Iterable[Task] | AsyncIterable[Task], size: int
) -> AsyncIterator[list[Task]]:
    if isinstance(tasks, AsyncIterable):
        batch: list[Task] = []
        async for task in tasks:
            batch.append(task)
            if len(batch) == size:
                yield batch
                batch = []
        if batch:
            yield batch
        return
    left = iter(tasks)
    # In a thread: a question file may take long to read, and the caller has leases to keep.
    while batch := await asyncio.to_thread(list, islice(left, size)):
        yield batch
