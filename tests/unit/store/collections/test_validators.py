"""The database itself refuses what does not fit, and takes everything that AgentRL writes."""

from typing import Any

import pytest
from pymongo.errors import OperationFailure, WriteError
from support.stored import claim, fill, make_task, make_turn, play

from agentrl.schema import (
    Fork,
    InferenceService,
    Policy,
    Run,
    SamplerInfo,
    ToolCall,
    ToolResult,
    TurnTraining,
)
from agentrl.store import TrajectoryStore
from agentrl.store.collections.validators import STORED_MODELS, ensure_validators, validator
from agentrl.store.collections.views import VIEWS, ensure_views


async def test_what_a_run_writes_fits(store: TrajectoryStore) -> None:
    await store.runs.create(Run(name=store.database_name, config={"a": [1, None, {"b": 2.0}]}))
    await store.trainer_leases.acquire("trainer", "host:1:a", 30)
    await store.tasks.add([make_task(0, num_generations=4)])
    record = await claim(store)
    call = ToolCall(id="c", name="f", arguments={"n": 2**70, "x": {"y": None}}, format_error="no")
    long = "x" * 2**20  # kept in blobs, with a reference in its place
    turn = make_turn(record, 0, text=long + "!", tool_calls=[call], num_output=300_000)
    await store.turns.append(turn, record.fence)
    results = [ToolResult(call_id="c", name="f", content=long)]
    await store.turns.set_tool_results(turn.id, record.id, record.fence, results)
    await store.records.release(record.id, record.fence)
    record = await claim(store)
    await store.records.fail_attempt(record.id, record.fence, "gone", 3)
    for _ in range(4):
        record = await play(store, await claim(store), num_turns=2)
    await store.ledger.reserve("trainer", [record.id], 1)
    await store.ledger.drop("trainer", ["train/0/q0/0"], 1, "stale")
    await store.ledger.commit("trainer", 1)
    await store.ledger.recover("trainer", 0)
    await store.policies.publish(Policy(version=1, path="p", checksum="c", num_bytes=2**40))
    await store.services.register(
        InferenceService(id="e", base_url="u", backend="sglang", model_path="m")
    )
    await store.services.set_status("e", status="updating", policy_version=1)
    await store.services.heartbeat("e")
    await store.samplers.heartbeat(SamplerInfo(id="s", host="h", pid=1, seconds_waiting={"a": 1}))
    await store.runs.update_control(max_staleness=2)
    await store.audit.add("cordon", {"samplers": ["s"]})
    await store.forks.add(
        Fork(id="f", record_id=record.id, attempt=1, task_id="x", turn=0, version=1, messages=({},))
    )
    await store.ledger.put_turn_trainings(
        [
            TurnTraining(
                id="t", consumer="trainer", step=1, turn_id=turn.id, record_id=record.id,
                task_id="x", num_tokens=1, num_trained_tokens=0, masked={"stale": 1}, staleness=3,
            )
        ]
    )  # fmt: skip
    for name in STORED_MODELS:
        total = await store.database[name].count_documents({})
        fitting = await store.database[name].count_documents(validator(name))
        assert (name, fitting) == (name, total)
        assert total > 0


@pytest.mark.parametrize(
    ("collection", "change"),
    [
        ("records", {"status": "done"}),
        ("records", {"num_output_tokens": "many"}),
        ("records", {"lease": {"owner": "me"}}),
        ("tasks", {"order": 0.5}),
        ("turns", {"output_ids": [1, 2]}),
        ("turns", {"version_spans.0.end": "7"}),
        ("runs", {"policy_version": None}),
        ("record_data", {"ledger.trainer": {"status": "eaten"}}),
    ],
)
async def test_what_does_not_fit_is_refused_by_the_database(
    store: TrajectoryStore, collection: str, change: dict[str, Any]
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await fill(store, 1, num_generations=1)
    with pytest.raises(WriteError, match="Document failed validation"):
        await store.database[collection].update_one({}, {"$set": change})
    # What people add, and what shells write for whole numbers, is let through.
    await store.database[collection].update_one({}, {"$set": {"my_note": "odd"}})
    await store.database["records"].update_one({}, {"$set": {"score.value": 1}})


async def test_a_database_of_an_earlier_release_gets_validators_and_views(
    store: TrajectoryStore,
) -> None:
    for name in STORED_MODELS:
        await store.database.handle.command("collMod", name, validator={})
    await store.database.handle.drop_collection("v_progress")
    await store.database.handle.drop_collection("v_failures")
    await store.database.handle.create_collection(
        "v_failures", viewOn="records", pipeline=[{"$limit": 1}]
    )
    await ensure_validators(store.database)
    await ensure_views(store.database)
    await fill(store, 1)
    with pytest.raises(OperationFailure, match="failed validation"):
        await store.database["records"].update_one({}, {"$set": {"status": "done"}})
    assert await store.database["v_failures"].count_documents({}) == 0
    found = await (await store.database.handle.list_collections(filter={"type": "view"})).to_list()
    assert {one["name"]: one["options"]["pipeline"] for one in found} == {
        name: pipeline for name, (_, pipeline) in VIEWS.items()
    }


async def test_views_tell_a_record_a_group_and_a_failure_in_one_document_each(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    await store.records.fail_attempt(record.id, record.fence, "no tools", 3)
    record = await claim(store)
    call = ToolCall(id="c", name="lookup", arguments={"q": "lamp"})
    turn = make_turn(record, 0, tool_calls=[call], num_output=300_000)
    await store.turns.append(turn, record.fence)
    await store.turns.set_tool_results(
        turn.id, record.id, record.fence, [ToolResult(call_id="c", name="lookup", content="4")]
    )
    await store.turns.append(make_turn(record, 1, version=2), record.fence)
    await store.records.fail_attempt(record.id, record.fence, "no tools", 1)
    await play(store, await claim(store), score=0.5)
    await store.ledger.drop("trainer", [record.id], 1, "no_score")

    shown = await store.database["v_trajectories"].find_one({"_id": record.id})
    assert shown is not None
    assert shown["question"] == "What does item 0 cost?"
    assert (shown["num_turns"], shown["max_version"]) == (2, 2)
    assert [t["num_output_tokens"] for t in shown["turns"]] == [300_000, 7]
    assert [t["num_added_tokens"] for t in shown["turns"]] == [100, 100]
    assert shown["turns"][0]["tool_calls"][0]["arguments"] == {"q": "lamp"}
    assert shown["turns"][0]["tool_results"] == [
        {"name": "lookup", "content": "4", "is_error": False}
    ]
    assert shown["training"]["trainer"]["reason"] == "no_score"
    group = await store.database["v_progress"].find_one({})
    assert group is not None
    assert (group["mean_score"], group["num_attempts"]) == (0.5, 3)
    (failure,) = await store.database["v_failures"].find({}).to_list()
    assert (failure["num_failed_attempts"], failure["last_error"]) == (2, "no tools")
