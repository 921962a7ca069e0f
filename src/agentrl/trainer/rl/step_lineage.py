"""What a step made of every turn that it consumed, for the database."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

from agentrl.data import StepBatch
from agentrl.schema import RatioStats, TurnTraining
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.rl.step_groups import StepGroups

RATIO_OUT_OF_RANGE = "ratio_out_of_range"
"""The importance ratio left the hard drop range."""
IMPORTANCE_CORRECTION = "importance_correction"
"""A correction's bounds or its veto masked the token."""


def turn_trainings(
    consumer: str, found: StepGroups, batch: StepBatch, outcome: StepOutcome
) -> list[TurnTraining]:
    """Return what the step made of its turns, those that were left out included."""
    return [*_left_out(consumer, found), *_trained(consumer, found, batch, outcome)]


def masked_tokens(found: StepGroups, outcome: StepOutcome) -> dict[str, int]:
    """Return how many sampled tokens of a step are not in its loss, by reason."""
    total: Counter[str] = Counter()
    for group in found.groups:
        for turn in group.left_out:
            total[turn.reason] += turn.num_terms
    ratios = outcome.ratios
    if outcome.skipped is not None:
        total[outcome.skipped] += int(ratios.num_terms.sum())
    else:
        total[RATIO_OUT_OF_RANGE] += int(ratios.num_dropped.sum())
        total[IMPORTANCE_CORRECTION] += int(ratios.num_masked.sum())
    return {reason: count for reason, count in sorted(total.items()) if count}


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do `work` while the block runs; it is done, or its error raised, when the block is left."""
    task = asyncio.create_task(work)
    try:
        yield
    except BaseException:
        task.cancel()
        await asyncio.wait({task})
        raise
    await task


def _left_out(consumer: str, found: StepGroups) -> Iterator[TurnTraining]:
    for group in found.groups:
        for turn in group.left_out:
            yield TurnTraining(
                id=f"{consumer}/{found.step}/{turn.turn_id}",
                consumer=consumer,
                step=found.step,
                turn_id=turn.turn_id,
                record_id=turn.record_id,
                task_id=group.task_id,
                num_tokens=turn.num_terms,
                num_trained_tokens=0,
                masked={turn.reason: turn.num_terms},
                staleness=turn.staleness,
            )


def _trained(
    consumer: str, found: StepGroups, batch: StepBatch, outcome: StepOutcome
) -> Iterator[TurnTraining]:
    turns = {turn.turn_id: (group, turn) for group in found.groups for turn in group.turns}
    ratios = outcome.ratios
    for row, number in enumerate(ratios.turns.tolist()):
        group, turn = turns[batch.turn_ids[number]]
        num_terms = int(ratios.num_terms[row])
        masked = {
            reason: int(counts[row])
            for reason, counts in (
                (RATIO_OUT_OF_RANGE, ratios.num_dropped),
                (IMPORTANCE_CORRECTION, ratios.num_masked),
            )
            if counts[row]
        }
        if outcome.skipped is not None:
            masked = {outcome.skipped: num_terms}
        yield TurnTraining(
            id=f"{consumer}/{found.step}/{turn.turn_id}",
            consumer=consumer,
            step=found.step,
            turn_id=turn.turn_id,
            record_id=turn.record_id,
            task_id=group.task_id,
            num_tokens=num_terms,
            num_trained_tokens=num_terms - sum(masked.values()),
            num_clipped_tokens=int(ratios.num_clipped[row]),
            masked=masked,
            advantage=turn.advantage,
            staleness=found.step - 1 - int(turn.versions.min()),
            ratio=RatioStats(
                mean=float(ratios.mean[row]),
                std=float(ratios.std[row]),
                min=float(ratios.min[row]),
                max=float(ratios.max[row]),
            ),
        )
