"""Selects the questions that later epochs repeat: fewer of those whose groups had equal scores.

Input: tasks in order, and the trainer's results for earlier groups of the same questions. Output:
the tasks to sample. A group of equal scores has no gradient, and the next group of its question
rarely has one, so its rollouts are better spent on other questions (GRESO: Zheng et al. 2025, "Act
Only When It Pays: Efficient Reinforcement Learning for LLM Reasoning via Selective Rollouts", arXiv
2506.02177).
"""

import logging
import random
from collections.abc import Sequence

from agentrl.schema import MCPTask, Task
from agentrl.schema.task import id_of_task
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore

_MAX_EPOCHS_BACK = 8
"""Number of earlier epochs considered. A question that none of them asked is asked again."""
_REPORT_EVERY = 100
"""Questions between two log lines; a step may request a single question."""

logger = logging.getLogger(__name__)


class RepeatedQuestions:
    """Draws the tasks of later epochs.

    A question whose last k groups in a row had equal scores is asked with probability p^k. Groups
    that are not yet trained on, or were dropped for another reason, do not count. A restarted
    process draws the same numbers, but may know more groups.
    """

    def __init__(self, store: TrajectoryStore, probability: float, seed: int) -> None:
        """Create without reading anything.

        Args:
            store: of the run.
            probability: p, from 0 (never again after one such group) to 1 (always).
            seed: of the draws.
        """
        self._store = store
        self._probability = probability
        self._seed = seed
        self._num_seen = self._num_left_out = self._next_report = 0

    async def __call__(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks to ask, in order, including all tasks of a first epoch.

        Raises:
            StoreError: the store failed.
        """
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
