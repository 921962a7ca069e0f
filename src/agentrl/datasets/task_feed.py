"""Adds training tasks to a run just ahead of its samplers, so they may be many or infinite.

Input: tasks in their order, made on demand. Output: tasks in the store, as the run needs them.
Independent of files and steps.
"""

import asyncio
from collections.abc import Iterator
from itertools import islice

from agentrl.datasets.task_stream import append_tasks
from agentrl.schema import Task
from agentrl.store import TrajectoryStore

_BATCH_SIZE = 1000


class TaskFeed:
    """Adds the tasks of a source to a run, limited to the requested number."""

    def __init__(self, store: TrajectoryStore, tasks: Iterator[Task]) -> None:
        """Take nothing yet; the tasks start from the first one in each process."""
        self._store = store
        self._tasks = tasks
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
            # In a thread, because creating a task may take time.
            batch = await asyncio.to_thread(list, islice(self._tasks, size))
            self._has_ended = len(batch) < size
            num_new, _ = await append_tasks(self._store, batch)
            # The store knows those of earlier processes: larger batches skip them faster.
            size = 1 if num_new else 2 * size
