"""Teachers' logprobs: claimed, written once, and kept with the turns."""

import numpy as np
import pytest
from support.stored import fill

from agentrl.errors import ConfigError
from agentrl.schema import DBRecordData, Run, Teacher
from agentrl.store import TrajectoryStore

BIG = Teacher(model="big")


def given(record: DBRecordData, value: float) -> dict[str, np.ndarray]:
    return {
        turn.id: np.full(len(turn.output_ids), value, dtype=np.float32) for turn in record.turns
    }


async def test_logprobs_are_written_once_and_travel_with_the_record(store: TrajectoryStore) -> None:
    record_ids = await fill(store, 1, num_turns=2)
    claimed = await store.teaching.claim("big", "me", 60)
    assert claimed is not None
    assert claimed.record_id == record_ids[0]
    await store.teaching.store("big", claimed.record_id, given(claimed, -1.5))
    await store.teaching.store("big", claimed.record_id, given(claimed, -9.0))
    await store.teaching.store("small", claimed.record_id, given(claimed, -2.0))
    [[first, second]] = await store.ledger.ready_groups(limit=1)
    assert first.taught.keys() == {"big", "small"}
    assert second.taught == {}
    for turn in first.turns:
        expected = np.full(len(turn.output_ids), -1.5, dtype=np.float32)
        np.testing.assert_array_equal(turn.teacher_logprobs["big"], expected)
        assert turn.teacher_logprobs["small"].dtype == np.float32
    assert await store.teaching.num_untaught("big") == 1
    assert await store.teaching.num_untaught("other") == 2


async def test_a_claim_is_exclusive_until_it_expires_or_is_released(store: TrajectoryStore) -> None:
    record_ids = await fill(store, 1)
    first = await store.teaching.claim("big", "me", 60)
    second = await store.teaching.claim("big", "me", -1)
    assert first is not None
    assert second is not None
    assert [first.record_id, second.record_id] == record_ids
    again = await store.teaching.claim("big", "you", 60)
    assert again is not None
    assert again.record_id == second.record_id
    assert await store.teaching.claim("big", "you", 60) is None
    await store.teaching.release("big", "someone else")
    assert await store.teaching.claim("big", "you", 60) is None
    await store.teaching.release("big", "me")
    assert await store.teaching.claim("big", "you", 60) is not None
    other = await store.teaching.claim("small", "me", 60)
    assert other is not None
    assert other.record_id == first.record_id


async def test_records_that_no_trainer_consumed_come_first(store: TrajectoryStore) -> None:
    record_ids = await fill(store, 2)
    await store.ledger.reserve("trainer", record_ids[:2], 1)
    claims = [await store.teaching.claim("big", "me", 60) for _ in range(4)]
    found = [claim.record_id for claim in claims if claim is not None]
    assert found == record_ids[2:] + record_ids[:2]


async def test_a_name_stands_for_one_model_and_one_prompt(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.teaching.register("big", BIG)
    await store.teaching.register("big", BIG)
    with pytest.raises(ConfigError, match=r"has 'big' as the model.* not 'larger'"):
        await store.teaching.register("big", Teacher(model="larger"))
    with pytest.raises(ConfigError, match="prompt"):
        await store.teaching.register("big", Teacher(model="big", prompts=("Answer: 4",)))
    run = await store.runs.get()
    assert run is not None
    assert run.teachers == {"big": BIG}


async def test_progress_tells_which_teacher_lacks_and_whether_its_process_lives(
    store: TrajectoryStore,
) -> None:
    await fill(store, 2)
    await store.runs.create(
        Run(name=store.database_name, status="training", config={"teachers": ["big", "small"]})
    )
    await store.trainer_leases.acquire("trainer", "me", 60)
    record = await store.teaching.claim("big", "node-b:7:1-a", 60)
    assert record is not None
    await store.teaching.store("big", record.record_id, given(record, -1.0))
    big, small = (await store.reports.progress()).untaught
    assert (big.num_records, small.num_records) == (3, 4)
    assert str(big).endswith(f"teach {store.database_name} --teacher big=MODEL")

    await store.teaching.show_alive("big", "node-b:7:1-a", 60)
    big, small = (await store.reports.progress()).untaught
    assert (
        str(big)
        == "no logprobs of teacher big yet for 3 records: its process node-b:7:1-a is alive"
    )
    assert small.process is None
    await store.teaching.leave("big", "node-c:7:1-a")
    assert (await store.reports.progress()).untaught[0].process == "node-b:7:1-a"
    await store.teaching.show_alive("big", "node-d:7:1-a", 60)
    await store.teaching.show_alive("big", "node-d:7:1-a", 60)
    await store.teaching.leave("big", "node-b:7:1-a")
    assert (await store.reports.progress()).untaught[0].process == "node-d:7:1-a"
    await store.teaching.leave("big", "node-d:7:1-a")
    assert (await store.reports.progress()).untaught[0].process is None
    await store.teaching.show_alive("big", "node-b:7:1-a", -1)
    assert (await store.reports.progress()).untaught[0].process is None

    await store.ledger.drop("trainer", [record.record_id], 1, "no_teacher")
    await store.runs.set_status("completed")
    assert (await store.reports.progress()).untaught == ()
