"""Old turns are removed while the run goes on, and what may still be needed stays."""

from datetime import timedelta
from pathlib import Path

import pytest
from support.consumed import NUM_GROUPS, trained_run, training_of
from support.stored import claim, make_task, make_turn, play

from agentrl.config.sections import AlgorithmSection
from agentrl.data import select_group
from agentrl.errors import StoreError
from agentrl.schema import Fork, Run
from agentrl.schema.ledger_origin import Retrain
from agentrl.store import TrajectoryStore
from agentrl.store.documents.packed_turns import Blob
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.store.repositories.unused_blobs import UnusedBlobs


async def expire(store: TrajectoryStore, step: int) -> int:
    expiring = await store.retention.of_step(step)
    assert expiring.waits_for == ""
    num_turns = 0
    for batch in expiring.batches:
        num_turns += await store.retention.expire(batch)
    await store.retention.finish_step(step)
    return num_turns


async def stored_ids(store: TrajectoryStore, collection: str) -> set[object]:
    return {one["_id"] async for one in store.database[collection].find({}, {"_id": 1})}


async def test_expired_turns_go_and_the_rest_of_the_run_stays(store: TrajectoryStore) -> None:
    tasks = await trained_run(store)
    records = await store.records.of_task(tasks[0])
    blobs = await stored_ids(store, "blobs")
    for num_turns in (4, 0):  # the trainer died before it noted the step, and repeats it
        assert await expire(store, 1) == num_turns
    assert await store.retention.expired_step() == 1
    left = await stored_ids(store, "turns")
    assert not left & {turn for record in records for turn in record.turns}
    assert len(left) == 4 * (NUM_GROUPS - 1)
    assert len(await stored_ids(store, "turn_training")) == 2 * (NUM_GROUPS - 1)
    detail = await store.reports.record_detail(records[0].id)
    assert detail.turns == ()
    assert detail.record.score == records[0].score
    assert detail.record.expired_at is not None
    with pytest.raises(StoreError, match="the turns of step 1 have expired"):
        await store.ledger.trained_groups("trainer", 1)
    trainings, groups = await store.ledger.trained_groups("trainer", 2)
    assert (len(trainings), groups[0][0].task_id) == (2, tasks[1])
    left_out = training_of(groups[0][0], 3).model_copy(update={"position": None})
    await store.ledger.put_turn_trainings([left_out])
    assert await store.ledger.trained_tasks("trainer", 3, 4) == tasks[2:]
    assert len(groups[0][0].turns) == 2
    # Blobs that other groups use too are not marked, the question's own are.
    unused = UnusedBlobs(store.database)
    marked = {
        one["_id"]
        async for one in store.database["blobs"].find({"unused_since": {"$exists": True}})
    }
    assert marked == set(await unused.unreferenced(sorted(map(str, blobs))))
    assert marked < blobs


async def test_a_group_stays_while_something_may_need_its_turns(store: TrajectoryStore) -> None:
    tasks = await trained_run(store)
    record = (await store.records.of_task(tasks[0]))[0]
    fork = Fork(
        id=f"fork:{record.id}@1-ab",
        record_id=record.id,
        attempt=1,
        task_id=tasks[0],
        turn=1,
        version=0,
    )
    await store.forks.add(fork)
    await store.database["record_data"].update_one(
        {"task_id": tasks[1], "traj_id": 0}, {"$set": {"score": None}}
    )
    await store.database["record_data"].update_one(
        {"task_id": tasks[2], "traj_id": 0},
        {"$set": {"ledger.trainer.status": "reserved", "ledger.trainer.step": 3}},
    )
    await store.database["record_data"].update_one(
        {"task_id": tasks[3], "traj_id": 1}, {"$set": {"ledger.trainer.step": 5}}
    )
    assert (await store.retention.of_step(4)).batches == ()  # step 5 used one of its records again
    assert (await store.retention.of_step(5)).batches == ((tasks[3],),)
    assert (await store.retention.of_step(1)).batches == ()  # forked
    assert (await store.retention.of_step(2)).batches == ()  # finished without a score
    assert (await store.retention.of_step(3)).waits_for == "trainer"  # no checkpoint holds it
    await store.trainer_leases.acquire("second", "host:2:b", 60)
    assert (await store.retention.of_step(5)).waits_for == "second"
    origin = Retrain(run=store.database_name, consumer="trainer", checkpoint=0, last_step=4)
    await store.runs.note_retrain("second", origin)
    assert (await store.retention.of_step(5)).batches == ((tasks[3],),)  # it ends before


async def test_a_resumed_trainer_drops_what_has_expired(store: TrajectoryStore) -> None:
    await trained_run(store)
    await expire(store, 1)
    await store.ledger.recover("trainer", 0)
    assert await store.retention.expired_step() == 0
    expired, kept = await store.ledger.ready_groups(limit=2)
    group = select_group(expired, AlgorithmSection(), policy_version=0)
    assert not group.usable
    assert set(group.dropped_records.values()) == {"expired"}
    assert len(kept[0].turns) == 2


async def test_a_blob_that_is_stored_again_is_not_removed(
    store: TrajectoryStore, mongo_uri: str
) -> None:
    await trained_run(store)
    unused = UnusedBlobs(store.database)
    lost, wanted = Blob("x", "lost" * 300), Blob("x", "wanted" * 300)
    await store.database["blobs"].insert_many([*lost.documents(), *wanted.documents()])
    await unused.mark([lost.key, wanted.key])
    assert await unused.remove(timedelta(hours=1), 100) == 0  # a turn may be on its way
    # Another process is about to refer to one of them.
    async with TrajectoryStore.connect(mongo_uri) as sampler:
        await sampler._blobs.put([wanted])
    assert await unused.remove(timedelta(0), 100) == 1
    left = await stored_ids(store, "blobs")
    assert wanted.key in left
    assert lost.key not in left


async def test_a_snapshot_stays_as_long_as_a_turn_names_it_and_moves_with_it(
    store: TrajectoryStore, mongod: EmbeddedMongo, tmp_path: Path
) -> None:
    await store.runs.create(Run(name="test"))
    await store.tasks.add([make_task(0, num_generations=1)])
    record = await claim(store)
    named, lost = [await store.snapshots.put(state) for state in (b"named", b"lost")]
    assert await store.snapshots.put(b"named") == named
    turn = make_turn(record, 0).model_copy(update={"snapshot": named})
    await store.turns.append(turn, record.fence)
    unused = UnusedBlobs(store.database)
    keys = [address.removeprefix("sha256:") for address in (named, lost)]
    await unused.mark(keys)
    assert await unused.remove(timedelta(0), 100) == 1
    assert [await store.snapshots.get(one) for one in (named, lost, "")] == [b"named", None, None]
    await store.transfer.export_run(tmp_path / "export")
    async with TrajectoryStore.connect(mongod.uri(), f"{store.database_name}_copy") as copy:
        await copy.transfer.import_run(tmp_path / "export")
        assert await copy.snapshots.get(named) == b"named"
        await copy.drop_database()


async def test_a_run_is_compacted_while_it_goes_on(store: TrajectoryStore) -> None:
    await store.ensure_schema()
    await store.runs.create(Run(name=store.database_name))
    await store.trainer_leases.acquire("trainer", "host:1:a", 60)
    await store.tasks.add([make_task(0), make_task(1)])
    dead = await claim(store)
    await store.turns.append(make_turn(dead, 0), dead.fence)
    await store.records.fail_attempt(dead.id, dead.fence, "gone", 3)
    scored = await play(store, await claim(store))
    running = await claim(store)
    await store.turns.append(make_turn(running, 0), running.fence)
    assert (scored.id, scored.attempt) == (dead.id, 2)
    assert (await store.maintenance.compact()).superseded_turns == 1
    assert await stored_ids(store, "turns") == {scored.turns[0], f"{running.id}/{running.fence}/0"}
    assert len(await store.turns.of_record(running.id)) == 1
