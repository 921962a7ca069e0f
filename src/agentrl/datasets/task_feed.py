"""Adds training tasks to a run just ahead of its samplers, so they may be many or infinite.

Input: tasks in their order, made on demand. Output: tasks in the store, as the run needs them.
Independent of files and steps.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from agentrl.datasets.task_stream import append_tasks
from agentrl.schema import Task
from agentrl.store import TrajectoryStore

_BATCH_SIZE = 1000


class TaskSupply(Protocol):
    """Makes a run's next tasks."""

    async def take(self, count: int) -> Sequence[Task]:
        """Return this many tasks; fewer if there are no more."""


class TasksInOrder:
    """The tasks of an iterator, which starts from the first one in each process."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks

    async def take(self, count: int) -> Sequence[Task]:
        """Return the next tasks; the store knows those of earlier processes."""
        # In a thread, because creating a task may take time.
        return await asyncio.to_thread(list, islice(self._tasks, count))


class TaskFeed:
    """Adds the tasks of a source to a run, limited to the requested number."""

    def __init__(self, store: TrajectoryStore, source: TaskSupply) -> None:
        """Take nothing yet."""
        self._store = store
        self._source = source
        self._has_begun = self._has_ended = False

    async def fill(self, num_groups: int) -> None:
        """Add tasks until the run has this many groups or more, or none is left."""
        if not self._has_begun:
            # A crash may have happened between writing the last batch's tasks and their slots.
            await self._store.tasks.add(await self._store.tasks.last(_BATCH_SIZE))
            self._has_begun = True
        size = 1
        while not self._has_ended:
            missing = num_groups - await self._store.tasks.next_train_order()
            if missing <= 0:
                return
            size = min(max(missing, size), _BATCH_SIZE)
            batch = await self._source.take(size)
            self._has_ended = len(batch) < size
            num_new, _ = await append_tasks(self._store, batch)
            # A source may restart with each process: larger batches skip the existing tasks faster.
            size = 1 if num_new else 2 * size
