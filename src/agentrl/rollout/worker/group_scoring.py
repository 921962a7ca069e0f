"""Scoring by a scorer that sees the whole group: decided once, when the last rollout has ended.

Every attempt asks for its own score. The one that finds all rollouts ended has the group scored and
stores the scores with the Task before any Record has a score. A crash in between, or a second
process that scores at the same moment, therefore cannot mix two verdicts.
"""

from typing import Self

from agentrl.rollout.context import RolloutContext
from agentrl.schema import MCPTask, Record, Score, Task

_UNFINISHED = frozenset({"planned", "pending", "running"})


class GroupVerdict:
    """The scores of all Records of a task, for the attempt at one of them."""

    def __init__(self, context: RolloutContext, task: MCPTask) -> None:
        self._context = context
        self._task = task
        self._scores: dict[int, Score] = {}

    @classmethod
    def of(cls, context: RolloutContext, task: Task) -> Self | None:
        """Return the verdict of a task whose Records are scored together; None for any other."""
        if isinstance(task, MCPTask) and context.scoring.sees_group(context.scorer_of(task)):
            return cls(context, task)
        return None

    async def score_of(self, record: Record) -> Score | None:
        """Return a finished Record's score; None while other rollouts of its group are running."""
        store, task = self._context.store, self._task
        records = await store.records.of_task(task.id)
        if any(record.status in _UNFINISHED for record in records):
            return None
        self._scores = await store.scores.of_group(task.id)
        if not self._scores:
            finished = [record for record in records if record.outcome is not None]
            judged_task = task.model_copy(update={"scorer": self._context.scorer_of(task)})
            scores = await self._context.scoring.score_group(judged_task, finished)
            by_try = {record.traj_id: score for record, score in zip(finished, scores, strict=True)}
            self._scores = await store.scores.decide_group(task.id, by_try)
        return self._scores[record.traj_id]

    async def score_waiting(self) -> int:
        """Score the Records of a decided group that no process holds.

        Call it after the attempt's own Record has its score or waits: a process that decided the
        group in the meantime could not score a Record that was held.
        """
        store, task_id = self._context.store, self._task.id
        scores = self._scores or await store.scores.of_group(task_id)
        if not scores:
            return 0
        num_scored = 0
        for record in await store.records.of_task(task_id):
            if record.status == "finished" and record.traj_id in scores:
                num_scored += await store.scores.set_waiting(record.id, scores[record.traj_id])
        return num_scored
