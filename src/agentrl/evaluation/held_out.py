"""Evaluate one policy version: add held-out tasks to the store, wait for their scores, report.

The samplers claim evaluation tasks before all training tasks, while the servers serve the version.
If nothing is published meanwhile (`eval_strategy ends`, `agentrl eval`), the version samples every
token. An evaluation during training (`eval_strategy steps`) does not delay new weights: running
rollouts continue with the newer version. Every turn stores which version sampled which token, so
the report counts these rollouts and also gives the figures without them.

The evaluation depends on the store alone, not on samplers or the trainer.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.errors import StoreError
from agentrl.evaluation.eval_scores import (
    EvalMetrics,
    TaskScores,
    rows_by_scorer,
    rows_by_tag,
    score_row,
)
from agentrl.runtime.installation import typed_command
from agentrl.runtime.processes.signals import stopped_within
from agentrl.schema import MCPTask, Record, Task
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25


async def evaluate(
    store: TrajectoryStore,
    tasks: Sequence[Task],
    *,
    step: int,
    version: int,
    reuse: bool,
    timeout_seconds: float,
    stop: asyncio.Event,
) -> EvalMetrics | None:
    """Let the samplers run `tasks` and return the scores; None when `stop` was set first.

    The tasks get orders that precede all training tasks. With `reuse`, those that an earlier process
    added for this step go on. The version is that of the weights after it.
    """
    started = time.monotonic()
    tag = await _free_tag(store, step, reuse=reuse)
    await store.tasks.add(_evaluation_tasks(tasks, tag))
    while (num_done := await store.tasks.count(tag=tag, status="completed")) < len(tasks):
        if time.monotonic() - started > timeout_seconds:
            raise StoreError(await _missing_scores_text(store, tag, num_done, len(tasks)))
        if await stopped_within(stop, _POLL_SECONDS):
            return None
    rollouts = await _task_rollouts(store, tag)
    metrics = _metrics(rollouts, step, version, time.monotonic() - started)
    if metrics is None:
        records = (record for rollout in rollouts for record in rollout.records)
        reason = next((f"{record.id}: {record.error}; " for record in records if record.error), "")
        command = typed_command("inspect", "failures", "--run_name", store.database_name)
        raise StoreError(
            f"evaluation {tag}: none of {len(tasks)} questions got a score; {reason}see {command}"
        )
    return metrics


@dataclass(frozen=True)
class _TaskRollouts:
    """A question with its rollouts."""

    task: Task
    records: Sequence[Record]

    def scores(self, *, only_version: int | None = None) -> TaskScores:
        """Return the scores; with `only_version`, of the rollouts sampled entirely by that version."""
        kept = [r for r in self.records if only_version is None or _is_sampled_by(r, only_version)]
        mcp_task = self.task if isinstance(self.task, MCPTask) else None
        return TaskScores(
            [None if record.score is None else record.score.value for record in kept],
            scorer="" if mcp_task is None else mcp_task.scorer,
            tags=() if mcp_task is None else mcp_task.tags,
        )


def _is_sampled_by(record: Record, version: int) -> bool:
    return record.min_version == record.max_version == version


async def _task_rollouts(store: TrajectoryStore, tag: str) -> list[_TaskRollouts]:
    return [
        _TaskRollouts(task, await store.records.of_task(task.id))
        async for task in store.tasks.find(tag=tag)
    ]


def _metrics(
    rollouts: Sequence[_TaskRollouts], step: int, version: int, seconds: float
) -> EvalMetrics | None:
    scores = [one.scores() for one in rollouts]
    total = score_row(scores)
    if total is None:
        return None
    scored = [record for one in rollouts for record in one.records if record.score is not None]
    return EvalMetrics(
        version=step,
        reward_mean=total.mean,
        num_tasks=total.num_tasks,
        num_unscored=total.num_unscored,
        num_off_version=sum(not _is_sampled_by(record, version) for record in scored),
        total=total,
        on_version=score_row([one.scores(only_version=version) for one in rollouts]),
        call_share=fmean(record.num_tool_calls > 0 for record in scored),
        by_scorer=rows_by_scorer(scores),
        by_tag=rows_by_tag(scores),
        seconds=seconds,
    )


async def _free_tag(store: TrajectoryStore, step: int, *, reuse: bool) -> str:
    """Return `eval@step`, with a number if that tag belongs to weights that a crash lost.

    After a crash, the run resumes from a checkpoint and trains the later steps again.
    """
    tag = f"eval@{step}"
    number = 1
    while not reuse and await store.tasks.count(tag=tag):
        number += 1
        tag = f"eval@{step}.{number}"
    return tag


def _evaluation_tasks(tasks: Sequence[Task], tag: str) -> list[Task]:
    name = tag.removeprefix("eval@")
    return [
        task.model_copy(
            update={
                "id": f"eval/{name}/{task.id.rpartition('/')[2]}",
                "split": "eval",
                "order": position - len(tasks),
                "tag": tag,
            }
        )
        for position, task in enumerate(tasks)
    ]


async def _missing_scores_text(
    store: TrajectoryStore, tag: str, num_done: int, num_tasks: int
) -> str:
    services = await store.services.all()
    num_up = sum(service.status == "up" for service in services)
    num_sampling = sum(info.status == "sampling" for info in await store.samplers.all())
    return (
        f"evaluation {tag}: {num_done} of {num_tasks} questions finished in time; {num_up} "
        f"inference server(s) up, {num_sampling} sampler(s) registered (raise "
        "eval_timeout_seconds (docs/advanced.md), or look at the samplers' logs)"
    )
