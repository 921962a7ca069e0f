"""Adds training tasks to a run just ahead of its samplers, so they may be many or infinite.

Input: tasks in their order, made on demand. Output: tasks in the store, as the run needs them.
Independent of files and steps.

Later epochs may repeat fewer of the questions whose groups had equal scores. Such a group has no
gradient, and the next group of its question rarely has one, so its rollouts are better spent on
other questions (GRESO: Zheng et al. 2025, "Act Only When It Pays: Efficient Reinforcement Learning
for LLM Reasoning via Selective Rollouts", arXiv 2506.02177).
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice

from agentrl.datasets.task_stream import append_tasks
from agentrl.schema import MCPTask, Task
from agentrl.schema.task import id_of_task
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore

_BATCH_SIZE = 1000
_MAX_EPOCHS_BACK = 8
"""Number of earlier epochs considered. A question that none of them asked is asked again."""
_REPORT_EVERY = 100
"""Questions between two log lines; a step may request a single question."""

logger = logging.getLogger(__name__)


class TaskFeed:
    """Adds the tasks of a source to a run, limited to the requested number."""

    def __init__(
        self,
        store: TrajectoryStore,
        tasks: Iterator[Task],
        choose: Callable[[Sequence[Task]], Awaitable[Sequence[Task]]] | None = None,
    ) -> None:
        """Read nothing yet.

        `tasks` are the same at every start; `choose` selects among the next ones.
        """
        self._store = store
        self._tasks = tasks
        self._choose = choose
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
            chosen = batch if self._choose is None else await self._choose(batch)
            num_new, _ = await append_tasks(self._store, chosen)
            # A source restarts with each process: larger batches skip the existing tasks faster.
            size = 1 if num_new else 2 * size


class RepeatedQuestions:
    """Draws the tasks of later epochs: fewer of those whose groups had equal scores.

    A question whose last k groups in a row had equal scores is asked with probability p^k. Groups
    that are not yet trained on, or were dropped for another reason, do not count. A restarted
    process draws the same numbers, but may know more groups.
    """

    def __init__(self, store: TrajectoryStore, probability: float, seed: int) -> None:
        """Draw with p from 0 (never again after one such group) to 1 (always)."""
        self._store = store
        self._probability = probability
        self._seed = seed
        self._num_seen = self._num_left_out = self._next_report = 0

    async def __call__(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks to ask, in order, including all tasks of a first epoch."""
        earlier_ids = {
            task.id: [
                id_of_task(task.split, epoch, task.dataset_id)
                for epoch in range(task.epoch - 1, max(-1, task.epoch - 1 - _MAX_EPOCHS_BACK), -1)
            ]
            for task in tasks
            if isinstance(task, MCPTask)
        }
        had_equal = await self._store.ledger.equal_scores(
            DEFAULT_CONSUMER, [earlier_id for ids in earlier_ids.values() for earlier_id in ids]
        )
        chosen = []
        for task in tasks:
            results = [
                had_equal[earlier_id]
                for earlier_id in earlier_ids.get(task.id, ())
                if earlier_id in had_equal
            ]
            num_equal = results.index(False) if False in results else len(results)
            draw = random.Random(f"{self._seed}/repeat/{task.id}").random()
            if draw < self._probability**num_equal:
                chosen.append(task)
        self._num_seen += len(tasks)
        self._num_left_out += len(tasks) - len(chosen)
        if self._num_left_out and self._num_seen >= self._next_report:
            self._next_report = self._num_seen + _REPORT_EVERY
            logger.info(
                "%d of %d questions skipped so far because their last groups had equal scores "
                "(repeat_equal_probability %g)",
                self._num_left_out,
                self._num_seen,
                self._probability,
            )
        return chosen
