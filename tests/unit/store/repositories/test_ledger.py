"""The training ledger: reserve, commit, drop, recover."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.stored import claim, fill, make_task, num_consumed, play

from agentrl.errors import ConfigError, LeaseLost, StoreError, TrainerBusy
from agentrl.schema import DBRecordData, LedgerEntry, Run
from agentrl.store import TrajectoryStore

NAME = "trainer"


async def entries(store: TrajectoryStore) -> list[LedgerEntry]:
    """The standing of every record, by (order, traj_id)."""
    found = store.database["record_data"].find().sort([("order", 1), ("traj_id", 1)])
    return [
        LedgerEntry.model_validate(document["ledger"].get(NAME, {})) async for document in found
    ]


async def standing(store: TrajectoryStore) -> list[tuple[str, int | None, tuple[int, ...]]]:
    """Return status, step and trainings; a ready record only remembers the step that was lost."""
    return [
        (entry.status, None if entry.status == "ready" else entry.step, entry.trained_at)
        for entry in await entries(store)
    ]


def ids(groups: list[list[DBRecordData]]) -> list[str]:
    return [data.record_id for group in groups for data in group]


READY = ("ready", None, ())


async def test_groups_come_in_order_whole_and_hydrated(store: TrajectoryStore) -> None:
    await store.tasks.add(make_task(number) for number in (2, 0, 1))  # their orders: 0, 1, 2
    played = [await play(store, await claim(store), num_turns=2) for _ in range(6)]
    record_ids = [record.id for record in played]
    groups = await store.ledger.ready_groups(NAME, limit=2)
    assert ids(groups) == record_ids[:4]
    assert all(len(data.turns) == 2 for group in groups for data in group)
    light = await store.ledger.ready_groups(NAME, limit=2, hydrate=False)
    assert ids(light) == record_ids[:4]
    assert all(data.turns == () for group in light for data in group)
    assert await store.ledger.ready_groups(NAME, split="eval", limit=2) == []
    assert await store.ledger.num_ready_groups(NAME) == 3


async def test_reserved_trained_and_dropped_groups_are_not_ready(store: TrajectoryStore) -> None:
    record_ids = await fill(store, 4)
    await store.ledger.reserve(NAME, record_ids[0:2], 1)
    for step, reason in ((1, "zero_variance"), (2, "stale")):  # the first drop counts
        await store.ledger.drop(NAME, record_ids[2:4], step, reason)
    await store.ledger.reserve(NAME, record_ids[4:6], 2)
    assert ids(await store.ledger.ready_groups(NAME, limit=9)) == record_ids[6:]
    assert await num_consumed(store, NAME) == 1
    assert await store.ledger.num_reserved_groups(NAME) == 2
    assert await store.ledger.commit(NAME, 1) == 2
    assert await standing(store) == [
        *[("trained", 1, (1,))] * 2,
        *[("dropped", 1, ())] * 2,
        *[("reserved", 2, ())] * 2,
        *[READY] * 2,
    ]
    assert await num_consumed(store, NAME) == 2
    assert (await entries(store))[2].reason == "zero_variance"
    assert (await entries(store))[0].trained_count == 1
    assert ids(await store.ledger.ready_groups(NAME, limit=9)) == record_ids[6:]


async def test_the_stream_is_exhausted_once_every_group_is_consumed(
    store: TrajectoryStore,
) -> None:
    assert await store.ledger.is_exhausted(NAME)
    first, second, third, fourth = await fill(store, 2)
    assert not await store.ledger.is_exhausted(NAME)
    await store.ledger.reserve(NAME, [first, second], 1)
    await store.ledger.drop(NAME, [third], 1, "stale")
    assert not await store.ledger.is_exhausted(NAME)
    await store.ledger.drop(NAME, [fourth], 1, "stale")
    assert await store.ledger.is_exhausted(NAME)
    assert not await store.ledger.is_exhausted("reader")
    await store.tasks.add([make_task(2)])
    assert not await store.ledger.is_exhausted(NAME)
    await claim(store)
    assert not await store.ledger.is_exhausted(NAME)


async def test_a_crash_before_the_checkpoint_makes_reserved_records_ready_again(
    store: TrajectoryStore,
) -> None:
    record_ids = await fill(store, 4)
    await store.ledger.reserve(NAME, record_ids[0:2], 1)
    await store.ledger.commit(NAME, 1)
    await store.ledger.reserve(NAME, record_ids[2:4], 2)
    await store.ledger.drop(
        NAME, record_ids[4:6], 2, {record_ids[4]: "stale", record_ids[5]: "failed"}
    )
    await store.ledger.recover(NAME, 1)
    assert await standing(store) == [*[("trained", 1, (1,))] * 2, *[READY] * 6]


async def test_a_crash_between_checkpoint_and_commit_loses_no_training(
    store: TrajectoryStore,
) -> None:
    record_ids = await fill(store, 2)
    await store.ledger.reserve(NAME, record_ids[:2], 1)
    await store.ledger.reserve(NAME, record_ids[2:], 2)
    await store.ledger.recover(NAME, 1)
    assert await standing(store) == [*[("trained", 1, (1,))] * 2, *[READY] * 2]


async def test_going_back_to_an_older_checkpoint_takes_commits_back(
    store: TrajectoryStore,
) -> None:
    record_ids = await fill(store, 3)
    for step in (1, 2, 3):
        await store.ledger.reserve(NAME, record_ids[2 * step - 2 : 2 * step], step)
        await store.ledger.commit(NAME, step)
    await store.ledger.recover(NAME, 1)
    assert await standing(store) == [*[("trained", 1, (1,))] * 2, *[READY] * 4]
    await store.ledger.recover(NAME, 0)
    assert await standing(store) == [READY] * 6
    assert await num_consumed(store, NAME) == 0


async def test_what_was_dropped_or_trained_cannot_be_reserved_again(
    store: TrajectoryStore,
) -> None:
    record_ids = await fill(store, 2)
    await store.ledger.reserve(NAME, record_ids[:2], 1)
    await store.ledger.reserve(NAME, record_ids[:2], 1)  # a repeated request
    with pytest.raises(StoreError, match="2 of 2 records cannot be reserved for step 2"):
        await store.ledger.reserve(NAME, record_ids[:2], 2)
    await store.ledger.commit(NAME, 1)
    with pytest.raises(StoreError):
        await store.ledger.reserve(NAME, record_ids[:2], 1)
    await store.ledger.drop(NAME, record_ids[:2], 2, "stale")  # keeps what was trained
    assert (await standing(store))[:2] == [("trained", 1, (1,))] * 2
    await store.ledger.drop(NAME, record_ids[2:], 1, "stale")
    with pytest.raises(StoreError):
        await store.ledger.reserve(NAME, record_ids[2:], 2)


async def test_consumers_keep_books_of_their_own(store: TrajectoryStore) -> None:
    record_ids = await fill(store, 1)
    await store.ledger.reserve("other", record_ids, 1)
    assert ids(await store.ledger.ready_groups("other", limit=1)) == []
    assert ids(await store.ledger.ready_groups(NAME, limit=1)) == record_ids


async def test_a_second_trainer_is_refused_until_the_first_releases(
    store: TrajectoryStore, mongo_uri: str
) -> None:
    await store.runs.create(Run(name="run"))
    lease = await store.trainer_leases.acquire(NAME, "first", 600)
    async with TrajectoryStore.connect(mongo_uri) as other:
        with pytest.raises(TrainerBusy, match="first trains it as 'trainer' since"):
            await other.trainer_leases.acquire(NAME, "second", 600)
        await store.trainer_leases.renew(NAME, 600)
        await store.trainer_leases.release(NAME)
        taken = await other.trainer_leases.acquire(NAME, "second", 600)
        assert taken.fence == lease.fence + 1


async def test_a_trainer_that_was_replaced_writes_nothing_more(
    store: TrajectoryStore, mongo_uri: str
) -> None:
    await store.runs.create(Run(name="run"))
    record_ids = await fill(store, 1)
    await store.trainer_leases.acquire(NAME, "asleep", -1)
    async with TrajectoryStore.connect(mongo_uri) as other:
        await other.trainer_leases.acquire(NAME, "awake", 600)
        await other.ledger.reserve(NAME, record_ids, 1)
        for write in (
            store.trainer_leases.renew(NAME, 600),
            store.trainer_leases.release(NAME),
            store.ledger.reserve(NAME, record_ids, 1),
            store.ledger.drop(NAME, record_ids, 1, "stale"),
            store.ledger.commit(NAME, 5),
            store.ledger.recover(NAME, 0),
        ):
            with pytest.raises(LeaseLost):
                await write
        assert await standing(other) == [("reserved", 1, ())] * 2


async def test_a_consumer_name_must_be_a_word(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name="run"))
    with pytest.raises(ConfigError, match="letters, digits and underscores"):
        await store.trainer_leases.acquire("a.b", "x", 1)


Step = tuple[str, int]


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.sampled_from(["train", "drop", "crash"]), st.integers(0, 3)),
        min_size=3,
        max_size=9,
    )
)
def test_any_history_with_crashes_equals_the_one_that_survived(
    mongo_uri: str, history: list[Step]
) -> None:
    """Replay: steps with a checkpoint each, crashes that go back some checkpoints."""
    import asyncio  # noqa: PLC0415 - hypothesis drives its own loop here

    asyncio.run(_replay(f"{mongo_uri}", history))


async def _replay(uri: str, history: list[Step]) -> None:
    async with TrajectoryStore.connect(uri) as store:
        await store.drop_database()
        await fill(store, 4)
        expected: list[list[tuple[str, int | None, tuple[int, ...]]]] = [await standing(store)]
        for what, number in history:
            step = len(expected)
            if what == "crash":
                checkpoint = max(0, step - 1 - number)
                ready = ids(await store.ledger.ready_groups(NAME, limit=1))
                await store.ledger.reserve(NAME, ready, step)  # work that the crash undoes
                await store.ledger.recover(NAME, checkpoint)
                del expected[checkpoint + 1 :]
            else:
                groups = await store.ledger.ready_groups(NAME, limit=1 + number % 2, step=step)
                if what == "train":
                    await store.ledger.reserve(NAME, ids(groups), step)
                else:
                    await store.ledger.drop(NAME, ids(groups), step, "stale")
                await store.ledger.commit(NAME, step)
                expected.append(await standing(store))
            assert await standing(store) == expected[-1]
        await store.drop_database()


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.integers(0, 6))
def test_a_crash_long_after_a_checkpoint_returns_to_what_it_would_have_committed(
    mongo_uri: str, sizes: list[int], checkpoint: int
) -> None:
    """Records are taken by steps of which none is committed before the crash."""
    import asyncio  # noqa: PLC0415 - hypothesis drives its own loop here

    asyncio.run(_late_checkpoint(mongo_uri, sizes, min(checkpoint, len(sizes))))


async def _late_checkpoint(uri: str, sizes: list[int], checkpoint: int) -> None:
    async with TrajectoryStore.connect(uri) as store:
        await store.drop_database()
        await fill(store, 4)
        at_once = await _taken(store, sizes[:checkpoint], commits=True)
        await store.ledger.recover(NAME, 0)
        await _taken(store, sizes, commits=False)
        await store.ledger.recover(NAME, checkpoint)
        assert await standing(store) == at_once
        await store.drop_database()


async def _taken(
    store: TrajectoryStore, sizes: list[int], *, commits: bool
) -> list[tuple[str, int | None, tuple[int, ...]]]:
    for step, size in enumerate(sizes, 1):
        groups = await store.ledger.ready_groups(NAME, limit=size, step=step)
        await store.ledger.reserve(NAME, ids(groups), step)
        if commits:
            await store.ledger.commit(NAME, step)
    return await standing(store)
