"""Attempts that another sampler takes up at their last durable turn."""

import pytest
from support.stored import make_task, make_turn, play, read_back

from agentrl.errors import LeaseLost
from agentrl.schema import Record
from agentrl.store import TrajectoryStore


async def claim(store: TrajectoryStore, owner: str, *, resumable: bool = True) -> Record:
    claimed = await store.records.claim(
        owner, lease_seconds=60, admitted_groups=10, max_attempts=3, resumable=resumable
    )
    assert claimed is not None
    return claimed[0]


async def expire(store: TrajectoryStore, record_id: str) -> None:
    await store.database["records"].update_one(
        {"_id": record_id}, [{"$set": {"lease.expires_at": {"$subtract": ["$$NOW", 1]}}}]
    )


@pytest.fixture
async def dead(store: TrajectoryStore) -> Record:
    """A record whose holder died after two acknowledged turns."""
    await store.tasks.add([make_task(0, num_generations=1)])
    record = await claim(store, "first")
    for index in range(2):
        await store.turns.append(make_turn(record, index, version=index + 3), record.fence)
    await expire(store, record.id)
    return record


async def test_a_dead_holders_attempt_is_taken_up_behind_its_last_durable_turn(
    store: TrajectoryStore, dead: Record
) -> None:
    record = await claim(store, "second")
    assert (record.attempt, record.fence) == (1, dead.fence + 1)
    assert len(record.turns) == 2
    assert (record.min_version, record.max_version) == (3, 4)
    first, second = record.attempts
    assert (first.owner, first.ended_by, first.first_turn) == ("first", "expired", 0)
    assert (second.owner, second.ended_by, second.first_turn) == ("second", None, 2)
    with pytest.raises(LeaseLost):
        await store.turns.append(make_turn(dead, 2), dead.fence)
    await store.turns.append(make_turn(record, 2), record.fence)
    await store.records.finish(
        record.id, record.fence, outcome="answered", final_answer="4", lease_seconds=60
    )
    done = await read_back(store, record)
    assert [attempt.ended_by for attempt in done.attempts] == ["expired", "finished"]
    turns = await store.turns.of_record(record.id)
    assert [turn.index for turn in turns] == [0, 1, 2]
    assert done.num_output_tokens == sum(len(turn.output_ids) for turn in turns)


async def test_without_the_flag_the_attempt_begins_anew_and_the_dead_one_stays_readable(
    store: TrajectoryStore, dead: Record
) -> None:
    record = await claim(store, "second", resumable=False)
    assert (record.attempt, record.turns, record.min_version) == (2, (), None)
    assert (record.num_output_tokens, record.attempts[-1].first_turn) == (0, 0)
    await store.turns.append(make_turn(record, 0), record.fence)
    assert [turn.id for turn in await store.turns.of_record(record.id, attempt=1)] == [
        f"{dead.id}/{dead.fence}/0",
        f"{dead.id}/{dead.fence}/1",
    ]
    assert len(await store.turns.of_record(record.id)) == 1


async def test_an_attempt_of_stateful_tools_is_never_taken_up(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=1)])
    first = await claim(store, "first", resumable=False)
    await store.turns.append(make_turn(first, 0), first.fence)
    await expire(store, first.id)
    assert (await claim(store, "second")).attempt == 2


async def test_an_attempt_that_failed_is_not_taken_up_and_one_handed_back_is(
    store: TrajectoryStore, dead: Record
) -> None:
    second = await claim(store, "second")
    await store.records.release(second.id, second.fence)
    third = await claim(store, "third")
    assert (third.attempt, len(third.turns)) == (1, 2)
    await store.records.fail_attempt(third.id, third.fence, "the tool is broken", 3)
    fourth = await claim(store, "fourth")
    assert (fourth.attempt, fourth.turns) == (2, ())


async def test_every_death_counts_even_when_the_attempt_is_taken_up(
    store: TrajectoryStore, dead: Record
) -> None:
    for owner in ("second", "third"):
        record = await claim(store, owner)
        await expire(store, record.id)
    counts = await store.groups.reap(3, lease_seconds=60)
    assert counts.num_expired == 1
    parked = await store.records.get(dead.id)
    assert parked is not None
    assert (parked.status, parked.attempt, len(parked.attempts)) == ("failed", 1, 3)


async def test_a_turn_that_was_stored_but_never_acknowledged_is_not_read(
    store: TrajectoryStore, dead: Record
) -> None:
    orphan = make_turn(dead, 2, text="never acknowledged")
    await store.database["turns"].insert_one(
        {
            **(await store.database["turns"].find_one({"_id": f"{dead.id}/1/1"}) or {}),
            "_id": orphan.id,
        }
        | {"index": 2}
    )
    assert [turn.index for turn in await store.turns.of_record(dead.id)] == [0, 1]
    record = await claim(store, "second")
    await store.turns.append(make_turn(record, 2), record.fence)
    await expire(store, record.id)
    third = await claim(store, "third", resumable=False)
    assert [turn.id for turn in await store.turns.of_record(dead.id, attempt=1)] == [
        f"{dead.id}/1/0",
        f"{dead.id}/1/1",
        f"{dead.id}/2/2",
    ]
    await play(store, third)
