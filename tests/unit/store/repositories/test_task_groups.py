"""Scores, group completion, and repair of what a crash left half done."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener, CommandStartedEvent
from support.stored import (
    claim,
    group_scores,
    make_task,
    make_turn,
    play,
    read_back,
    tag_scores,
    wrong_counts,
)

from agentrl.errors import LeaseLost
from agentrl.schema import Run, Score, Task
from agentrl.store import TrajectoryStore
from agentrl.store.documents.codec import Document


async def test_a_group_completes_with_its_last_record_and_only_once(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    await play(store, await claim(store))
    assert not await store.groups.complete({"train/0/q0"})
    assert await store.ledger.ready_groups(limit=1) == []
    await play(store, await claim(store), score=0.0)
    task = await store.tasks.get("train/0/q0")
    assert task is not None
    assert task.status == "completed"
    assert not await store.groups.complete({"train/0/q0"})
    assert await group_scores(store, "train/0/q0") == [1.0, 0.0]


async def test_a_group_completes_whoever_ends_the_last_record_of_those_a_process_held(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0, num_generations=3)])
    first, second, third = [await claim(store) for _ in range(3)]
    await play(store, first)
    await store.records.release(second.id, second.fence)
    await play(store, third)
    assert await store.ledger.ready_groups(limit=1) == []
    assert await store.tasks.count(status="completed") == 0
    await play(store, await claim(store, "another"))
    assert await group_scores(store, "train/0/q0") == [1.0, 1.0, 1.0]


class Commands(CommandListener):
    """Names of the commands that a client sends."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.names.append(event.command_name)

    def succeeded(self, _event: object) -> None:
        pass

    def failed(self, _event: object) -> None:
        pass


async def test_a_group_is_looked_at_once_if_one_process_holds_all_of_its_records(
    store: TrajectoryStore, mongo_uri: str
) -> None:
    await store.tasks.add([make_task(0, num_generations=8)])
    commands = Commands()
    async with AsyncMongoClient[Document](mongo_uri, event_listeners=[commands]) as client:
        sampler = TrajectoryStore.from_client(client)
        held = [await claim(sampler) for _ in range(8)]
        for record in held:
            await play(sampler, record)
    assert commands.names.count("distinct") == 1
    assert await store.tasks.count(status="completed") == 1


async def test_a_lease_that_a_late_answer_renewed_leaves_its_group_to_the_reaper(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    first, second = await claim(store), await claim(store)
    await play(store, first)
    store._db.leases.note(first.id, first.fence, 600)
    await play(store, second)
    assert await store.tasks.count(status="completed") == 0
    assert (await store.groups.reap(3, lease_seconds=60)).num_groups_completed == 1


async def test_a_record_that_waits_for_a_scorer_holds_up_no_group_of_the_process_that_had_it(
    store: TrajectoryStore, mongo_uri: str
) -> None:
    await store.tasks.add([make_task(0, num_generations=2)])
    waiting = await play(store, await claim(store), score=None)
    await store.scores.postpone(waiting.id, waiting.fence, "the judge is away", 0)
    last = await claim(store)
    async with TrajectoryStore.connect(mongo_uri) as elsewhere:
        assert await elsewhere.scores.set_waiting(waiting.id, Score(scorer="exact", value=0.0))
    await play(store, last)
    assert await store.tasks.count(status="completed") == 1


async def test_every_link_of_a_finished_group_resolves(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    for _ in range(2):
        await play(store, await claim(store), num_turns=3, version=5)
    ((first, second),) = await store.ledger.ready_groups(limit=1)
    assert (first.traj_id, second.traj_id) == (0, 1)
    for data in (first, second):
        record = await store.records.get(data.record_id)
        assert record is not None
        assert record.turns == data.turn_ids == tuple(turn.id for turn in data.turns)
        assert {turn.task_id for turn in data.turns} == {data.task_id} == {record.task_id}
        assert data.num_tokens == 3 * 107
        assert (data.min_version, data.max_version) == (5, 5)
        assert data.score == record.score


async def test_tags_of_evaluations_give_their_scores(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(n, split="eval", tag="eval@3") for n in (0, 1)])
    await play(store, await claim(store), score=0.5)
    assert await tag_scores(store, "eval@3") == {
        "eval/0/q0": [0.5, None],
        "eval/0/q1": [None, None],
    }
    assert await tag_scores(store, "eval@4") == {}
    assert await store.tasks.count(tag="eval@3", status="completed") == 0


@pytest.mark.parametrize("lost_step", ["everything", "record data", "promotion", "closing"])
async def test_a_crash_between_two_steps_of_completion_is_repaired(
    store: TrajectoryStore, lost_step: str
) -> None:
    await store.tasks.add([make_task(0)])
    for _ in range(2):
        await play(store, await claim(store))
    # Take the database back to where a process that died at this step would have left it.
    await store.database["records"].update_many({}, {"$set": {"group_open": True}})
    if lost_step != "closing":
        await store.database["record_data"].update_many({}, {"$set": {"group_completed": False}})
    if lost_step in ("everything", "record data"):
        await store.database["tasks"].update_one({}, {"$set": {"status": "created"}})
        await store.database["record_data"].delete_many(
            {"traj_id": {"$gte": int(lost_step == "record data")}}
        )
    counts = await store.groups.reap(3, lease_seconds=60)
    assert counts.num_groups_completed == int(lost_step in ("everything", "record data"))
    (group,) = await store.ledger.ready_groups(limit=5)
    assert [data.group_completed for data in group] == [True, True]
    assert await store.database["records"].count_documents({"group_open": True}) == 0
    assert (await store.groups.reap(3, lease_seconds=60)).num_groups_completed == 0


async def test_a_half_promoted_group_is_not_yet_ready(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    for _ in range(2):
        await play(store, await claim(store))
    await store.database["record_data"].update_one(
        {"traj_id": 1}, {"$set": {"group_completed": False}}
    )
    assert await store.ledger.ready_groups(limit=5) == []
    await store.database["record_data"].update_many({}, {"$set": {"group_completed": False}})
    assert not await store.ledger.is_exhausted()


async def test_a_put_off_scoring_is_claimed_by_another_when_its_time_comes(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0, num_generations=1)])
    record = await play(store, await claim(store), score=None, num_turns=2)
    assert await store.scores.claim("other", 60) is None, "its finisher still holds it"
    await store.scores.postpone(record.id, record.fence, "judge: $503", 600)
    assert await store.scores.claim("other", 60) is None, "it is put off"
    await store.database["records"].update_one(
        {}, [{"$set": {"lease.expires_at": {"$subtract": ["$$NOW", 1]}}}]
    )
    claimed = await store.scores.claim("other", 60)
    assert claimed is not None
    taken, task = claimed
    assert (taken.status, taken.fence, taken.error) == ("finished", 2, "judge: $503")
    assert task.id == "train/0/q0"
    with pytest.raises(LeaseLost):
        await store.scores.set(record.id, record.fence, Score(scorer="exact", value=0.0))
    await store.scores.set(record.id, taken.fence, Score(scorer="exact", value=0.75))
    scored = await read_back(store, record)
    assert (scored.status, scored.error, scored.attempt) == ("scored", None, 1)
    assert await group_scores(store, "train/0/q0") == [0.75]


async def test_a_scorer_that_dies_or_stops_leaves_the_scoring_to_others(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0, num_generations=1)])
    record = await play(store, await claim(store), score=None)
    await store.records.release(record.id, record.fence)
    claimed = again = None
    while claimed is None:  # until the millisecond of the release is over by the server's clock
        claimed = await store.scores.claim("second", 0.001)
    assert claimed[0].fence == 2
    while again is None:  # until the lease of a millisecond is over by the server's clock
        again = await store.scores.claim("third", 60)
    assert again[0].fence == 3
    with pytest.raises(LeaseLost):
        await store.scores.postpone(record.id, claimed[0].fence, "late", 0)


async def test_repeating_a_score_after_a_lost_answer_is_harmless(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=1)])
    record = await play(store, await claim(store))
    await store.scores.set(record.id, record.fence, Score(scorer="exact", value=0.0))
    assert (await read_back(store, record)).score == record.score


async def test_pushing_tasks_again_repairs_and_duplicates_nothing(store: TrajectoryStore) -> None:
    tasks = [make_task(number, num_generations=3) for number in range(5)]
    assert await store.tasks.add(tasks, max_documents=6) == 5
    await store.database["records"].delete_many({"traj_id": 2})
    await play(store, await claim(store))
    assert await store.tasks.add(tasks) == 0
    assert await store.tasks.count(split="train") == 5
    assert len(await store.records.of_task("train/0/q0")) == 3
    assert [r.status for r in await store.records.of_task("train/0/q0")] == [
        "scored",
        "pending",
        "pending",
    ]
    assert await store.tasks.next_train_order() == 5
    assert [task.id async for task in store.tasks.find()] == [task.id for task in tasks]


async def test_tasks_that_are_added_at_the_same_time_share_no_order_and_leave_none_out(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name=store.database_name))
    lots = [
        [make_task(n) for n in numbers] for numbers in (range(30), range(20, 60), range(60, 75))
    ]
    added = await asyncio.gather(*(store.tasks.add(lot, max_documents=9) for lot in lots))
    assert sum(added) == 75
    tasks = [task async for task in store.tasks.find()]
    assert [task.order for task in tasks] == list(range(75))
    assert sorted(task.id for task in tasks) == sorted(make_task(n).id for n in range(75))
    orders = {task.id: task.order for task in tasks}
    for own in (range(20), range(30, 60), range(60, 75)):
        given = [orders[make_task(n).id] for n in own]
        assert given == sorted(given), "tasks of one source keep their order"
    slots = [(slot.order, slot.traj_id) async for slot in store.records.find()]
    assert sorted(slots) == [(order, number) for order in range(75) for number in range(2)]
    assert await wrong_counts(store) == []


async def test_batches_whose_slots_a_crash_left_out_are_completed_by_adding_them_again(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name=store.database_name))
    tasks = [make_task(number) for number in range(60)]
    assert await store.tasks.add(tasks[:40], max_documents=9) == 40
    # As a process leaves it that dies while it writes the slots of one batch and the next one's tasks.
    await store.database["records"].delete_many({"order": {"$gte": 34}})
    assert await store.tasks.add(tasks, max_documents=9) == 20
    assert [task.order async for task in store.tasks.find()] == list(range(60))
    slots = [(slot.order, slot.traj_id) async for slot in store.records.find()]
    assert sorted(slots) == [(order, number) for order in range(60) for number in range(2)]
    assert await wrong_counts(store) == []


# PyMongo drops a connection whose opening is cancelled; garbage collection closes it.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)
async def test_an_addition_that_is_cancelled_anywhere_ends_and_is_completed_by_the_next(
    store: TrajectoryStore,
) -> None:
    await store.runs.create(Run(name=store.database_name))
    tasks = [make_task(number) for number in range(60)]
    before = asyncio.all_tasks()
    num_cancelled = 0
    for moment in range(40):
        adding = asyncio.create_task(store.tasks.add(tasks, max_documents=9))
        await asyncio.sleep(0.002 * moment)
        adding.cancel()
        num_cancelled += isinstance(
            (await asyncio.gather(adding, return_exceptions=True))[0], asyncio.CancelledError
        )
        assert asyncio.all_tasks() == before, "a batch is still being written"
    assert num_cancelled > 5
    await store.tasks.add(tasks, max_documents=9)
    assert [task.order async for task in store.tasks.find()] == list(range(60))
    slots = [(slot.order, slot.traj_id) async for slot in store.records.find()]
    assert sorted(slots) == [(order, number) for order in range(60) for number in range(2)]
    assert await wrong_counts(store) == []


async def test_the_batches_before_a_bad_task_are_stored_whole(store: TrajectoryStore) -> None:
    def source() -> Iterator[Task]:
        for number in range(10):
            yield make_task(number)
        raise ValueError("a bad line")

    with pytest.raises(ValueError, match="a bad line"):
        await store.tasks.add(source(), max_documents=6)
    num_tasks = await store.tasks.count()
    assert 6 <= num_tasks <= 10
    assert await store.database["records"].count_documents({}) == 2 * num_tasks


async def test_training_tasks_are_numbered_as_they_come_and_others_are_not(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(3), make_task(7, split="eval"), make_task(9)])
    await store.tasks.add([make_task(5)])
    found = {task.id: task.order async for task in store.tasks.find()}
    assert found == {"eval/0/q7": -993, "train/0/q3": 0, "train/0/q9": 1, "train/0/q5": 2}


async def test_images_of_an_own_kind_of_task_are_its_own_business(store: TrajectoryStore) -> None:
    class Album(Task):
        kind = "album"
        images: tuple[int | str, ...]

    url = "data:image/png;base64,AAAA"
    await store.tasks.add([Album(id="train/0/a", split="train", order=0, images=(7, url))])
    document = await store.database["tasks"].find_one({"kind": "album"})
    assert document is not None
    assert document["images"] == [7, url]


async def test_tasks_may_come_from_an_asynchronous_source(store: TrajectoryStore) -> None:
    async def source() -> AsyncIterator[Task]:
        for number in range(5):
            yield make_task(number)

    assert await store.tasks.add(source(), max_documents=6) == 5
    assert await store.tasks.count() == 5


async def test_a_group_whose_slots_are_still_being_added_does_not_complete(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0, num_generations=3)])
    await store.database["records"].delete_many({"traj_id": {"$gt": 0}})
    await play(store, await claim(store))
    assert not await store.groups.complete({"train/0/q0"})
    assert await store.tasks.count(status="completed") == 0
    assert await store.database["record_data"].count_documents({}) == 0


async def test_a_failed_slot_keeps_the_turns_of_its_last_attempt(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=1)])
    record = await claim(store)
    await store.turns.append(make_turn(record, 0), record.fence)
    await store.records.fail_attempt(record.id, record.fence, "tools are down", 1)
    ((data,),) = await store.ledger.ready_groups(limit=1)
    assert data.score is None
    assert len(data.turns) == 1
