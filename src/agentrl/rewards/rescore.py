"""Add further scores to scored records, and a first score to records without one.

Records without a score were dead-lettered because of a scorer's defect.
"""

import asyncio
from dataclasses import dataclass, field

from agentrl.errors import ScoringError
from agentrl.rewards.agent_config import AgentConfig
from agentrl.rewards.factory import WORLD, Scorer
from agentrl.rewards.registered_scoring import rollout_of
from agentrl.rewards.rollout_view import Rollout
from agentrl.runtime.ending_tasks import joint_tasks
from agentrl.schema import GroundTruth, MCPTask, Record, RecordStatus, Score
from agentrl.store import TrajectoryStore

CONCURRENCY = 16
"""Scorings under way at the same time."""
MAX_REASONS = 5
_SCORABLE: tuple[RecordStatus, ...] = ("scored", "failed")


@dataclass
class RescoreCounts:
    """Records by the outcome of their rescoring."""

    num_scored: int = 0
    num_repaired: int = 0
    """Records that had no score because of a defect in this scorer, and have one now."""
    num_known: int = 0
    """Records that had a score of this scorer and version."""
    num_open: int = 0
    """Records whose group is still being sampled."""
    num_undecided: int = 0
    """Records that the scorer could not decide; they stay unscored and may be retried."""
    reasons: list[str] = field(default_factory=list)
    """Why the first few of them could not be decided."""


async def rescore(
    store: TrajectoryStore, scorer: Scorer, config: AgentConfig | None = None
) -> RescoreCounts:
    """Add the score of `scorer` to every record of a completed `MCPTask`, without sampling.

    Existing scores are kept. If a record has none because of a defect in this scorer, the score
    becomes the record's own. The call may be repeated, also by several processes at once: a record
    has one score of each scorer and version.
    """
    counts = RescoreCounts()
    slots = asyncio.Semaphore(CONCURRENCY)

    async def score(record: Record) -> None:
        try:
            await _score(store, scorer, config, record, counts)
        finally:
            slots.release()

    if scorer.sees_group:
        await _rescore_groups(store, scorer, config, counts)
        return counts
    async with joint_tasks() as group:
        for status in _SCORABLE:
            async for record in store.records.find(status=status):
                if record.outcome is not None:
                    await slots.acquire()
                    group.create_task(score(record))
    return counts


async def _score(
    store: TrajectoryStore,
    scorer: Scorer,
    config: AgentConfig | None,
    record: Record,
    counts: RescoreCounts,
) -> None:
    if record.score_of(scorer.name, scorer.version) is not None:
        counts.num_known += 1
        return
    task = await store.tasks.get(record.task_id)
    if not isinstance(task, MCPTask):
        return  # its sampler class does its own scoring
    if task.status != "completed":
        counts.num_open += 1
        return
    try:
        rollout = await _stored_rollout(store, task, record) if scorer.takes_rollout else None
        truth = GroundTruth.of(task)
        score = await scorer.score(record.final_answer, truth, config, rollout=rollout)
    except ScoringError as error:
        _count_undecided(record, error, counts)
        return
    await _store(store, task, record, score, counts)


async def _stored_rollout(store: TrajectoryStore, task: MCPTask, record: Record) -> Rollout:
    """Return what was done, with what the tools told an earlier scoring."""
    turns = await store.turns.get_many(record.turns)
    assert record.outcome is not None
    rollout = rollout_of(turns, outcome=record.outcome, columns=task.columns, reward=record.reward)
    known = [
        score.inputs[WORLD]
        for score in (record.score, *record.more_scores)
        if score is not None and WORLD in score.inputs
    ]
    return rollout.recalling(known[0] if known else [])


async def _rescore_groups(
    store: TrajectoryStore, scorer: Scorer, config: AgentConfig | None, counts: RescoreCounts
) -> None:
    """Rescore with a scorer that sees whole groups."""
    async for task in store.tasks.find():
        if not isinstance(task, MCPTask):
            continue
        finished = [one for one in await store.records.of_task(task.id) if one.outcome is not None]
        new = [one for one in finished if one.score_of(scorer.name, scorer.version) is None]
        counts.num_known += len(finished) - len(new)
        if task.status != "completed":
            counts.num_open += len(new)
        elif new:
            try:
                scores = await scorer.score_group(finished, GroundTruth.of(task), config)
            except ScoringError as error:
                for record in new:
                    _count_undecided(record, error, counts)
                continue
            for record, score in zip(finished, scores, strict=True):
                if record in new:
                    await _store(store, task, record, score, counts)


def _count_undecided(record: Record, error: ScoringError, counts: RescoreCounts) -> None:
    counts.num_undecided += 1
    if len(counts.reasons) < MAX_REASONS:
        counts.reasons.append(f"{record.id}: {error}")


async def _store(
    store: TrajectoryStore, task: MCPTask, record: Record, score: Score, counts: RescoreCounts
) -> None:
    if record.status == "failed" and score.scorer == await _scorer_of(store, task):
        repaired = await store.scores.repair(record.id, score)
        counts.num_repaired += repaired
        counts.num_known += not repaired
        return
    added = await store.scores.add(record.id, score)
    counts.num_scored += added
    counts.num_known += not added


async def _scorer_of(store: TrajectoryStore, task: MCPTask) -> str:
    """Return the name of the scorer that gives a task's records their first score."""
    run = await store.runs.get()
    override = None if run is None else run.control.scorer
    return task.scorer if override is None or task.split != "train" else override
