"""`agentrl ui --example`: the finished run that ships with AgentRL, to look at before training.

Input: the export in `assets/demo`, which scripts/make_example_run writes. Output: the same run in a
private database of a temporary folder that is removed afterwards, and a path through it.
"""

import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.config.named_files import shipped_file
from agentrl.config.sections import RootConfig
from agentrl.runtime.tar_files import unpack_files
from agentrl.schema import DispatchedSamplingTask
from agentrl.schema.base import Value
from agentrl.store import DEFAULT_CONSUMER, TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.store.views.lineage import StepRecord

EXAMPLE_RUN = "example"
ARCHIVE = "assets/demo/run.tar.xz"
_MAX_FILES, _MAX_BYTES = 100, 1 << 28


class ExampleTour(Value):
    """One place of the run on each level: a step, its group, and the turn that lost it."""

    step: int
    task_id: str
    winner: str
    """A rollout of the group that solved the question."""
    loser: str
    """One that did not."""
    turn: int
    """The loser's first turn that differs from the winner's."""


@asynccontextmanager
async def served_example(config: RootConfig) -> AsyncIterator[tuple[RootConfig, ExampleTour]]:
    """Yield where the example is served, and the path through it; nothing of it stays afterwards."""
    with tempfile.TemporaryDirectory(prefix="agentrl-example-") as name:
        folder = Path(name)
        with tarfile.open(shipped_file(ARCHIVE)) as archive:
            unpack_files(archive, folder, max_files=_MAX_FILES, max_bytes=_MAX_BYTES)
        data_dir = folder / "mongo"
        with EmbeddedMongo(data_dir) as mongo:
            async with TrajectoryStore.connect(mongo.uri(), EXAMPLE_RUN) as store:
                await store.transfer.import_run(folder / EXAMPLE_RUN)
                tour = await _tour(store)
            places = {"db_connection_string": None, "mongo_data_dir": data_dir}
            run = config.run.model_copy(update={"run_name": EXAMPLE_RUN})
            section = config.store.model_copy(update=places)
            yield config.model_copy(update={"run": run, "store": section}), tour


async def _tour(store: TrajectoryStore) -> ExampleTour:
    """Return the path to the last group whose rollouts part after an equal first turn."""
    (last,) = await store.figures.last_steps(DEFAULT_CONSUMER, 1)
    found: ExampleTour | None = None
    for step in range(last["step"], 0, -1):
        for pair in _pairs(await store.lineage.records_of_step(step)):
            winner, loser = [await _turns(store, one.record_id) for one in pair]
            turn = _first_difference(winner, loser)
            found = ExampleTour(
                step=step,
                task_id=pair[0].task_id,
                winner=pair[0].record_id,
                loser=pair[1].record_id,
                turn=turn,
            )
            if turn > 0:
                return found
    assert found is not None, "the example has a group with different scores"
    return found


def _pairs(records: list[StepRecord]) -> list[tuple[StepRecord, StepRecord]]:
    """Return the best and the worst trained rollout of every group."""
    groups: dict[str, list[StepRecord]] = {}
    for one in records:
        if one.status == "trained" and one.score is not None:
            groups.setdefault(one.task_id, []).append(one)
    ranked = [sorted(group, key=lambda one: one.score or 0.0) for group in groups.values()]
    return [(group[-1], group[0]) for group in ranked if group[-1].score != group[0].score]


async def _turns(store: TrajectoryStore, record_id: str) -> tuple[DispatchedSamplingTask, ...]:
    return (await store.reports.record_detail(record_id)).turns


def _first_difference(
    winner: tuple[DispatchedSamplingTask, ...], loser: tuple[DispatchedSamplingTask, ...]
) -> int:
    """Return the index of the loser's first turn that the winner did not sample equally."""
    same = 0
    while same < min(len(winner), len(loser)) - 1 and tuple(winner[same].output_ids) == tuple(
        loser[same].output_ids
    ):
        same += 1
    return loser[same].index
