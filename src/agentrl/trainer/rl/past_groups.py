"""Reads the groups of steps that another trainer made, for a trainer that makes these steps again.

Input: the ledger and the turn trainings of the other trainer. Output: the same `StepGroups`, without
the records that the own ledger leaves out. No sampler is admitted, and nothing waits.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config.sections import RootConfig
from agentrl.schema import DBRecordData
from agentrl.schema.ledger_origin import LEFT_OUT, Retrain
from agentrl.schema.run import ANY_AGE
from agentrl.trainer.rl.run_start import OpenedRun
from agentrl.trainer.rl.step_groups import (
    GroupReader,
    RecordImages,
    StepGroups,
    image_reader,
    scored_by,
)


class PastGroupReader(GroupReader):
    """Fills every step with the turns that the same step of another trainer used."""

    def __init__(self, origin: Retrain, *arguments: Any, **settings: Any) -> None:
        """Repeat the steps of `origin`; the arguments are those of `GroupReader`."""
        super().__init__(*arguments, **settings)
        self._origin = origin

    async def read_step(
        self, step: int, *, groups_consumed: int, stop: asyncio.Event
    ) -> StepGroups:
        """Read the groups of the step, or of the next one of which something is left."""
        for past in range(step, self._origin.last_step + 1):
            if stop.is_set():
                return StepGroups(past, end="stopped")
            collected = await self._read_past(past)
            if collected.usable:
                return collected
        return StepGroups(self._origin.last_step, end="data_ended")

    async def _read_past(self, step: int) -> StepGroups:
        ledger, source = self._store.ledger, self._origin.consumer
        trainings, trained = await ledger.trained_groups(source, step)
        dropped = [one async for one in ledger.find(source, status="dropped", step=step)]
        others = {one.task_id for one in dropped} - {group[0].task_id for group in trained}
        collected = StepGroups(
            step,
            turn_ids={training.turn_id for training in trainings},
            end="data_ended" if step == self._origin.last_step else "full",
        )
        # The limit may have been edited during the run; the trainings state which turns were used.
        algorithm = self._algorithm.under(ANY_AGE)
        for records in (*trained, *await ledger.groups(sorted(others))):
            kept = without_left_out(records, self._consumer)
            if kept:
                scored = scored_by(self._scorer, kept) or kept
                await self._add_group(scored, collected, algorithm)
        reasons = {one.record_id: one.ledger[source].reason or "" for one in dropped}
        await ledger.drop(self._consumer, sorted(reasons), step, reasons)
        return collected


def without_left_out(records: Sequence[DBRecordData], consumer: str) -> list[DBRecordData]:
    """Return the records of a group that a trainer did not leave out of the steps that it repeats."""
    entries = ((one, one.ledger.get(consumer)) for one in records)
    return [one for one, entry in entries if entry is None or entry.reason != LEFT_OUT]


async def group_reader(run: OpenedRun, config: RootConfig, model_path: Path) -> GroupReader:
    """Return the reader of a trainer's groups, which are past ones if it repeats another's steps."""
    document = await run.store.runs.get()
    origin = None if document is None else document.retrains.get(config.trainer.consumer)
    make = GroupReader if origin is None else partial(PastGroupReader, origin)
    return make(
        run.store,
        RecordImages(run.store, image_reader(model_path, config.model)),
        algorithm=config.algorithm,
        trainer=config.trainer,
        seed=config.run.seed,
        more_may_come=config.rollout.enable_sampling,
        control=run.control,
        feed=run.feed,
    )
