"""Which groups a step takes, and in which order."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.stored import claim, make_task, play
from support.training import Player, train_tasks

from agentrl.config.sections import AlgorithmSection, TrainerSection
from agentrl.errors import TrainingError
from agentrl.schema import Control, Policy, Record, Run
from agentrl.schema.lost_versions import LostVersions, step_of, version_of
from agentrl.store import TrajectoryStore
from agentrl.trainer.rl.step_groups import GroupReader, RecordImages

CONTROL = Control(groups_per_step=1, max_staleness=1)


class Reads:
    """Reads a step, but gives up after a number of looks at the store."""

    def __init__(
        self, store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch, **algorithm: Any
    ) -> None:
        self.store = store
        self.reader = GroupReader(
            store,
            RecordImages(store, None),
            algorithm=AlgorithmSection(**algorithm),
            trainer=TrainerSection(max_steps=9),
            seed=0,
            more_may_come=True,
            control=CONTROL,
        )
        self.stop, self.looks = asyncio.Event(), 0
        ready_groups = store.ledger.ready_groups

        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.looks += 1
            if self.looks >= 3:
                self.stop.set()
            return await ready_groups(*args, **kwargs)

        monkeypatch.setattr(store.ledger, "ready_groups", counted)

    async def step(self, step: int, num_groups: int = 1) -> list[str]:
        self.stop.clear()
        self.looks = 0
        self.reader.control = CONTROL.model_copy(update={"groups_per_step": num_groups})
        found = await self.reader.read_step(step, groups_consumed=step - 1, stop=self.stop)
        return [group.task_id for group in found.groups]


async def overtaken(store: TrajectoryStore, model_path: Path) -> tuple[Player, Record]:
    """Group 1 is complete, the last slot of group 0 is still being played."""
    await store.tasks.add(train_tasks(3, 2))
    player = Player(model_path)
    slots = []
    for _ in range(4):
        claimed = await store.records.claim(
            "player:1:0", lease_seconds=60, admitted_groups=2, max_attempts=3
        )
        assert claimed is not None
        slots.append(claimed[0])
    for slot in (slots[0], *slots[2:]):
        await player.finish(store, slot, float(slot.traj_id))
    return player, slots[1]


async def test_with_drop_whatever_is_complete_is_taken(
    store: TrajectoryStore, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await overtaken(store, model_path)
    assert await Reads(store, monkeypatch).step(1) == ["train/0/q1"]


async def test_with_wait_no_group_overtakes_a_slower_one(
    store: TrajectoryStore, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player, last = await overtaken(store, model_path)
    reads = Reads(store, monkeypatch, staleness_policy="wait")
    assert await reads.step(1) == []
    await player.finish(store, last, 1.0)
    assert await reads.step(1) == ["train/0/q0"]
    assert await reads.step(2) == ["train/0/q1"]


async def test_with_wait_a_step_fills_up_behind_a_slow_rollout(
    store: TrajectoryStore, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player, last = await overtaken(store, model_path)
    reads = Reads(store, monkeypatch, staleness_policy="wait", max_staleness=0)
    assert await reads.step(1) == []
    await player.finish(store, last, 1.0)
    reads.reader.control = Control(groups_per_step=2, max_staleness=0)
    found = await reads.reader.read_step(1, groups_consumed=0, stop=asyncio.Event())
    assert [group.task_id for group in found.groups] == ["train/0/q0", "train/0/q1"]
    assert dict(found.dropped) == {}
    assert found.staleness == {0: 4}


async def test_records_of_lost_versions_are_not_fresh(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.trainer_leases.acquire("trainer", "host:1:a", 60)
    for version in range(4):
        await store.policies.publish(Policy(version=version, path="p", num_bytes=1))
    await store.tasks.add(make_task(number) for number in range(4))
    for version in (1, 2, 3, 4):
        for score in (0.0, 1.0):
            await play(store, await claim(store), version=version, score=score)
    assert await store.runs.note_lost_versions(3) is None
    # No checkpoint holds steps 2 and 3, which were published: step 2 makes version 4 now.
    assert await store.runs.note_lost_versions(1) == LostVersions(after=1, last=3)
    assert await store.runs.note_lost_versions(1) is None  # the next start resumes what it wrote
    await store.policies.publish(Policy(version=1, path="p", num_bytes=1))
    assert len(await store.policies.all()) == 4
    await store.policies.publish(Policy(version=4, path="p", num_bytes=1))
    run = await store.runs.get()
    assert run is not None
    assert run.step == 2
    made = await store.policies.of_step(2)
    assert made is not None
    assert made.version == 4
    reads = Reads(store, monkeypatch)
    reads.reader.lost_versions = run.lost_versions
    reads.reader.control = Control(groups_per_step=2, max_staleness=1)
    found = await reads.reader.read_step(3, groups_consumed=2, stop=asyncio.Event())
    # Version 1 is an ancestor of version 4; the lost version 2 is two steps away from it.
    assert [group.task_id for group in found.usable] == ["train/0/q0", "train/0/q3"]
    assert dict(found.dropped) == {"stale": 4}
    assert found.staleness == {0: 2, 1: 2}


async def test_a_step_that_is_made_again_reads_the_groups_that_it_read_before(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.trainer_leases.acquire("trainer", "host:1:a", 60)
    await store.tasks.add(make_task(number) for number in range(4))
    late = [await claim(store) for _ in range(2)]
    for scores in ((0.0, 1.0), (1.0, 1.0), (0.0, 1.0)):
        for score in scores:
            await play(store, await claim(store), score=score)
    reads = Reads(store, monkeypatch, staleness_policy="drop")
    reads.reader.control = Control(groups_per_step=2)

    async def read() -> tuple[list[str], int]:
        found = await reads.reader.read_step(1, groups_consumed=0, stop=asyncio.Event())
        return [group.task_id for group in found.groups], len(found.records)

    first = await read()
    assert first == (["train/0/q1", "train/0/q2", "train/0/q3"], 6)
    for claimed, score in zip(late, (0.0, 1.0), strict=True):
        await play(store, claimed, score=score)
    await store.ledger.recover("trainer", 0)
    assert await read() == first


def test_no_number_is_given_twice_and_a_lost_one_is_mirrored_at_the_version_that_was_resumed() -> (
    None
):
    # Steps 5 to 8 make versions 10 to 13, of which 12 and 13 are lost after step 6.
    lost = [LostVersions(after=4, last=9), LostVersions(after=11, last=13)]
    assert [version_of(step, lost) for step in (0, 4, 5, 6, 7, 8)] == [0, 4, 10, 11, 14, 15]
    assert [step_of(version, lost) for version in (-1, 3, 4, 10, 11, 14)] == [-1, 3, 4, 5, 6, 7]
    assert [step_of(version, lost) for version in (5, 8, 9, 12, 13)] == [3, 0, -2, 5, 4]


async def taught(store: TrajectoryStore, name: str) -> None:
    claimed = await store.teaching.claim(name, "me", 60)
    assert claimed is not None
    logprobs = {turn.id: turn.output_logprobs - 1.0 for turn in claimed.turns}
    await store.teaching.store(name, claimed.record_id, logprobs)


async def test_a_group_waits_for_all_of_its_teachers(
    store: TrajectoryStore, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await overtaken(store, model_path)
    reads = Reads(store, monkeypatch, teachers=("big", "small"), advantage_estimator="opd")
    assert await reads.step(1) == []
    for name in ("big", "small", "big"):
        await taught(store, name)
        assert await reads.step(1) == []
    await taught(store, "small")
    assert await reads.step(1) == ["train/0/q1"]


async def test_with_wait_no_group_overtakes_one_without_its_teacher(
    store: TrajectoryStore, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player, last = await overtaken(store, model_path)
    algorithm = {"teachers": ("big",), "advantage_estimator": "opd"}
    reads = Reads(store, monkeypatch, staleness_policy="wait", **algorithm)
    for _ in range(2):
        await taught(store, "big")
    await player.finish(store, last, 1.0)
    assert await reads.step(1, num_groups=2) == []
    for _ in range(2):
        await taught(store, "big")
    assert await reads.step(1, num_groups=2) == ["train/0/q0", "train/0/q1"]


async def test_a_long_wait_for_a_teacher_ends_the_run_by_name(
    store: TrajectoryStore, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await overtaken(store, model_path)
    reads = Reads(store, monkeypatch, teachers=("big",), teacher_wait_seconds=0.05)
    with pytest.raises(TrainingError, match=r"waited 0 s for teacher big; start `agentrl teach"):
        await reads.step(1)
