"""Counts that are kept are what counting would say, whatever happens beside them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from support.stored import claim, fill, make_task, num_consumed, play, wrong_counts

from agentrl.schema import Run, Score
from agentrl.store import TrajectoryStore
from agentrl.store.repositories import tallies


async def kept(store: TrajectoryStore) -> dict[int, set[str]]:
    """The counts that are stored, by tally."""
    return {
        one["_id"]: one.keys() & {"added", "ended"}
        async for one in store.database["tallies"].find({"_id": {"$ne": "whole"}}).sort("_id", 1)
    }


async def play_all(store: TrajectoryStore, *, failing: int = 0) -> None:
    """Play every slot; the first few fail, or have a defective scorer, in turn."""
    number = 0
    while (
        claimed := await store.records.claim(
            "s", lease_seconds=60, admitted_groups=10**6, max_attempts=1
        )
    ) is not None:
        record = claimed[0]
        if number < failing and number % 2:
            await store.records.fail_attempt(record.id, record.fence, "no server", 1)
        else:
            record = await play(store, record, score=None)
            if number < failing:
                await store.scores.fail(record.id, record.fence, "a defect")
            else:
                score = Score(scorer="exact", value=number % 3)
                await store.scores.set(record.id, record.fence, score)
        number += 1


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of few orders, so that few tasks make several."""
    monkeypatch.setattr(tallies, "SPAN", 4)


@pytest.mark.usefixtures("short_spans")
async def test_a_span_is_counted_once_its_groups_have_ended(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name, admitted_groups=3))
    await store.tasks.add(make_task(number) for number in range(9))
    await store.tasks.add(make_task(number, split="eval", tag="eval@0") for number in range(2))
    spans = (-250, 0, 1, 2)
    assert await kept(store) == {span: {"added"} for span in spans}
    assert await wrong_counts(store) == []
    await play_all(store, failing=4)
    assert await wrong_counts(store) == []
    assert await store.tallies.seal() == 2  # the others are not admitted yet
    await store.runs.set_admission(10**6)
    assert await store.tallies.seal() == 2
    assert await kept(store) == {span: {"added", "ended"} for span in spans}
    assert await wrong_counts(store) == []
    assert await store.tallies.seal() == 0


async def test_adding_to_what_has_ended_opens_it_again(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name, admitted_groups=10))
    await fill(store, 2)
    await store.tallies.seal()
    await store.tasks.add([make_task(7), make_task(8)])
    assert await kept(store) == {0: {"added"}}
    assert await wrong_counts(store) == []
    await claim(store)
    await play(store, await claim(store))
    assert await wrong_counts(store) == []


async def test_adding_what_is_there_touches_nothing(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name, admitted_groups=10))
    await fill(store, 2)
    await store.tallies.seal()
    assert await store.tasks.add([make_task(0), make_task(1)]) == 0
    assert await kept(store) == {0: {"added", "ended"}}


async def test_a_repaired_score_is_counted(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name, admitted_groups=10))
    await store.tasks.add([make_task(0)])
    await play_all(store, failing=1)
    await store.tallies.seal()
    assert (await store.reports.by_split())["train"].num_failed == 1
    assert await store.scores.repair("train/0/q0/0", Score(scorer="s", value=0.5))
    assert (await store.reports.by_split())["train"].num_failed == 0
    assert await wrong_counts(store) == []
    await store.tallies.seal()
    assert await kept(store) == {0: {"added", "ended"}}
    assert await wrong_counts(store) == []


async def test_a_writer_that_died_is_never_outdated(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name, admitted_groups=10))
    await fill(store, 2)
    writing = store.tallies.changing([3], "dead")
    await writing.__aenter__()
    assert await store.tallies.seal() == 0
    assert await kept(store) == {0: set()}
    assert await wrong_counts(store) == []


Interleaved = Callable[[TrajectoryStore], Awaitable[Any]]


async def add_one(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(9)])


async def repair_one(store: TrajectoryStore) -> None:
    await store.scores.repair("train/0/q0/0", Score(scorer="s", value=0.5))


@pytest.mark.parametrize("interleaved", [add_one, repair_one])
async def test_a_count_that_a_write_overtook_is_not_stored(
    store: TrajectoryStore, interleaved: Interleaved
) -> None:
    await store.runs.create(Run(name=store.database_name, admitted_groups=10))
    await store.tasks.add([make_task(0), make_task(1)])
    await play_all(store, failing=1)
    count = store.tallies._count_ended

    async def overtaken(ranges: Sequence[tuple[int, int]]) -> dict[str, Any]:
        found = await count(ranges)
        with patch.object(store.tallies, "_count_ended", count):
            await interleaved(store)
        return found

    with patch.object(store.tallies, "_count_ended", overtaken):
        await store.tallies.seal()
    assert await wrong_counts(store) == []
    await store.tallies.seal()
    assert await wrong_counts(store) == []


@pytest.mark.usefixtures("short_spans")
async def test_an_earlier_release_s_run_is_counted_and_gets_its_tallies(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name=store.database_name, admitted_groups=10))
    await fill(store, 4)
    await store.tasks.add([make_task(4)])
    await store.database["tallies"].drop()
    assert await wrong_counts(store) == []
    await store.ensure_schema()
    assert await kept(store) == {0: set(), 1: set()}
    await store.tallies.seal()
    assert await kept(store) == {0: {"added", "ended"}, 1: {"added"}}
    assert await wrong_counts(store) == []


async def test_slots_that_a_crash_left_out_are_added_and_counted(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name, admitted_groups=10))
    await store.tasks.add([make_task(0), make_task(1)])
    await store.database["records"].delete_one({"_id": "train/0/q1/1"})
    assert await store.tasks.add([make_task(0), make_task(1)]) == 0
    assert await store.records.get("train/0/q1/1") is not None
    assert await wrong_counts(store) == []


async def test_consumed_groups_follow_the_ledger(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name, admitted_groups=10))
    ids = await fill(store, 4)
    await store.ledger.reserve("trainer", ids[:2], 1)
    await store.ledger.drop("trainer", ids[2:4], 1, "stale")
    assert await wrong_counts(store) == []
    await store.ledger.commit("trainer", 1)
    assert await wrong_counts(store) == []
    assert await num_consumed(store) == 2
    await store.ledger.recover("trainer", 0)
    assert await wrong_counts(store) == []
