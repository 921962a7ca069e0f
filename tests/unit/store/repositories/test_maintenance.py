"""Measuring, tidying up, and bringing an earlier release's database forward."""

import pytest
from support.stored import claim, fill, make_task, make_turn, play

from agentrl.errors import StoreError
from agentrl.schema import Run, SamplerInfo
from agentrl.store import TrajectoryStore
from agentrl.store.documents.packed_turns import Blob


async def test_compacting_deletes_only_what_nothing_needs(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([make_task(0)])
    dead = await claim(store)
    long = "only the dead attempt said so " * 40_000
    await store.turns.append(make_turn(dead, 0, text=long), dead.fence)
    await store.records.fail_attempt(dead.id, dead.fence, "gone", 3)
    scored = await play(store, await claim(store), num_turns=2)
    # Its turns stay readable: the record failed for good.
    failed = await claim(store)
    await store.turns.append(make_turn(failed, 0), failed.fence)
    await store.records.fail_attempt(failed.id, failed.fence, "gone", 1)
    # What a crash between two writes leaves: a turn that its record does not name, a lone blob.
    refused = make_turn(scored, 7).model_dump()
    original = await store.database["turns"].find_one({"_id": scored.turns[0]})
    assert original is not None
    await store.database["turns"].insert_one({**original, "_id": refused["id"], "index": 7})
    await store.database["blobs"].insert_many(Blob("x", "y" * 900_000).documents())
    before = await store.reports.record_detail(scored.id)

    plan = await store.maintenance.plan_compaction()
    assert (plan.superseded_turns, plan.unreferenced_turns) == (1, 1)
    assert plan.num_bytes > len(long) + 900_000
    assert await store.maintenance.compact() == plan
    assert (await store.maintenance.plan_compaction()).num_bytes == 0
    after = await store.reports.record_detail(scored.id)
    assert [turn.id for turn in after.turns] == [turn.id for turn in before.turns]
    assert after.turns[0].added_messages == before.turns[0].added_messages
    assert len(after.record.attempts) == 2
    assert len(await store.turns.of_record(failed.id)) == 1
    assert await store.turns.of_record(dead.id, 1) == []


async def test_a_run_is_idle_when_everybody_is_gone(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.trainer_leases.acquire("trainer", "host:1:a", 60)
    with pytest.raises(StoreError, match="host:1:a trains it as 'trainer', with a lease until"):
        await store.maintenance.check_idle()
    await store.trainer_leases.release("trainer")
    await store.samplers.heartbeat(SamplerInfo(id="host:2:b", host="host", pid=2))
    with pytest.raises(StoreError, match="sampler host:2:b has been active since"):
        await store.maintenance.check_idle()
    await store.samplers.heartbeat(SamplerInfo(id="host:2:b", host="host", pid=2, status="stopped"))
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    with pytest.raises(StoreError, match="holds a lease on one of its records"):
        await store.maintenance.check_idle()
    await store.records.release(record.id, record.fence)
    await store.maintenance.check_idle()


async def test_stats_count_every_collection(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name))
    await fill(store, 2, num_turns=4)
    stats = await store.maintenance.stats()
    sizes = {size.name: size for size in stats.collections}
    assert (sizes["records"].num_documents, sizes["turns"].num_documents) == (4, 16)
    assert stats.num_tokens == 4 * 4 * 107
    assert stats.bytes_per_token is not None
    assert 4 < stats.bytes_per_token < 40
    assert "v_progress" not in sizes
