"""What is stored of a turn, and what comes back."""

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from support.stored import SYSTEM, TOOLS, claim, make_task, make_turn, play

from agentrl.errors import LeaseLost, StoreError
from agentrl.schema import DispatchedSamplingTask, ToolCall, ToolResult, rebuild_prompts
from agentrl.store import TrajectoryStore
from agentrl.store.documents.packed_turns import ToolsPacker
from agentrl.store.private_mongod import EmbeddedMongo


def same(left: DispatchedSamplingTask, right: DispatchedSamplingTask) -> bool:
    """Equal in every field, arrays compared byte for byte."""
    a, b = left.model_dump(), right.model_dump()
    arrays = ("added_ids", "output_ids", "output_logprobs")
    return all(
        a[name].tobytes() == b[name].tobytes() and a[name].dtype == b[name].dtype for name in arrays
    ) and {k: v for k, v in a.items() if k not in arrays} == {
        k: v for k, v in b.items() if k not in arrays
    }


async def test_turns_come_back_byte_for_byte_and_rebuild_their_prompts(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    call = ToolCall(id="c1", name="lookup", arguments={"$q": "apple", "a.b": {"$ref": [1, None]}})
    written = [
        make_turn(record, index, tool_calls=[call] if index == 0 else [], text=f"tür {index}")
        for index in range(12)
    ]
    for turn in written:
        await store.turns.append(turn, record.fence)
    result = ToolResult(call_id="c1", name="lookup", content="4 €", seconds=0.25)
    await store.turns.set_tool_results(written[0].id, record.id, record.fence, [result])
    written[0] = written[0].model_copy(update={"tool_results": (result,)})
    read = await store.turns.of_record(record.id)
    assert all(same(a, b) for a, b in zip(written, read, strict=True))
    for a, b in zip(rebuild_prompts(written), rebuild_prompts(read), strict=True):
        assert a.tobytes() == b.tobytes()
    stored = await store.records.get(record.id)
    assert stored is not None
    assert stored.turns == tuple(turn.id for turn in written)
    assert (stored.num_prompt_tokens, stored.num_output_tokens) == (1200, 84)
    assert stored.num_tool_calls == 1


async def test_choices_of_experts_come_back_however_many_they_are(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    few, many = (np.random.default_rng(1).bytes(size) for size in (60, 2 * 2**20))
    written = [
        make_turn(record, index).model_copy(update={"routed_experts": routes, "routed_bytes": 2})
        for index, routes in enumerate((few, many))
    ]
    for turn in written:
        await store.turns.append(turn, record.fence)
    read = await store.turns.of_record(record.id)
    assert [turn.routed_experts for turn in read] == [few, many]
    assert all(same(a, b) for a, b in zip(written, read, strict=True))


async def test_shared_parts_of_a_group_are_stored_once(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=8)])
    for _ in range(8):
        await play(store, await claim(store), num_turns=3)
    blobs = {blob["kind"]: blob async for blob in store.database["blobs"].find()}
    assert await store.database["blobs"].count_documents({}) == 3
    assert sorted(blobs) == ["added_ids", "added_messages", "tools"]
    assert blobs["added_messages"]["value"]["content"] == SYSTEM
    assert blobs["tools"]["value"] == list(TOOLS)
    root = await store.database["turns"].find_one({"index": 0})
    assert root is not None
    assert root["added_messages"][0]["role"] == "system"
    assert root["added_messages"][0]["preview"].startswith("You answer with")
    assert root["added_messages"][1] == {"role": "user", "content": "train/0/q0?"}
    assert root["tools"]["names"] == ["lookup"]


async def test_each_root_turn_keeps_the_tools_that_it_showed(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=4)])
    shown: Any = copy.deepcopy(TOOLS)
    shown[0]["function"]["description"] = "another one"
    written = []
    for tools in (TOOLS, TOOLS, shown, ()):
        record = await claim(store)
        turn = make_turn(record, 0).model_copy(update={"tools": copy.deepcopy(tools)})
        await store.turns.append(turn, record.fence)
        written.append((record.id, tools))
    for record_id, tools in written:
        (read,) = await store.turns.of_record(record_id)
        assert read.tools == tuple(tools)
    packer = ToolsPacker()
    packed, _ = packer.pack(tuple(shown), 0)
    shown[0]["function"]["description"] = "changed in place"
    assert packer.pack(tuple(shown), 0)[0] != packed


async def test_a_person_reads_text_and_little_endian_arrays(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    turn = make_turn(record, 1)
    await store.turns.append(turn, record.fence)
    stored = await store.database["turns"].find_one({"_id": turn.id})
    assert stored is not None
    assert stored["output_text"] == "<answer>4</answer>"
    assert stored["output_ids"] == turn.output_ids.astype("<i4").tobytes()
    assert stored["output_logprobs"] == turn.output_logprobs.astype("<f4").tobytes()
    assert stored["task_id"] == "train/0/q0"
    assert stored["finished_at"].tzinfo is not None


async def test_values_beyond_the_document_limit_are_split(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    huge = "x" * (17 * 2**20)
    turn = make_turn(
        record, 1, num_output=3_000_000, text=huge, messages=[{"role": "user", "content": huge}]
    )
    await store.turns.append(turn, record.fence)
    image, moved = "ab" * 32, "cd" * 32
    results = (
        ToolResult(call_id="c", name="fetch", content=huge, images=(f"sha256:{moved}",)),
        ToolResult(call_id="d", name="draw", content="", images=(f"sha256:{image}",)),
    )
    await store.turns.set_tool_results(turn.id, record.id, record.fence, results)
    (read,) = await store.turns.of_record(record.id)
    assert same(read, turn.model_copy(update={"tool_results": results}))
    # What the turn does not name would be removed as unused.
    blobs = store.database["blobs"].find({"kind": {"$exists": True}}, {"_id": 1})
    stored = await store.database["turns"].find_one({"_id": turn.id}, {"blobs": 1})
    assert stored is not None
    assert set(stored["blobs"]) == {image, moved} | {blob["_id"] async for blob in blobs}


@pytest.mark.parametrize(
    ("argument", "stored_as"),
    [
        (2**63, str(2**63)),
        ("\ud800", "\\ud800"),
        ({"a\0b": 1}, {"a\\0b": 1}),
        (float("inf"), float("inf")),
        ([True, None, -(2**63)], [True, None, -(2**63)]),
    ],
)
async def test_whatever_a_model_writes_can_be_stored(
    store: TrajectoryStore, argument: object, stored_as: object
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    call = ToolCall(id="c", name="lookup", arguments={"q": argument})
    await store.turns.append(make_turn(record, 0, tool_calls=[call]), record.fence)
    (read,) = await store.turns.of_record(record.id)
    assert read.tool_calls[0].arguments == {"q": stored_as}


async def test_appending_again_after_a_lost_answer_changes_nothing(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    turn = make_turn(record, 0)
    await store.turns.append(turn, record.fence)
    once = await store.records.get(record.id)
    await store.turns.append(turn, record.fence)
    assert await store.records.get(record.id) == once
    assert await store.database["turns"].count_documents({}) == 1


async def test_results_of_a_fresh_lease_need_no_look_and_of_an_old_one_are_refused(
    store: TrajectoryStore, mongo_uri: str
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store, lease_seconds=60)
    turn = make_turn(record, 0)
    await store.turns.append(turn, record.fence)
    result = ToolResult(call_id="c", name="lookup", content="4")
    with patch.object(store.turns, "_refused", side_effect=AssertionError):
        await store.turns.set_tool_results(turn.id, record.id, record.fence, [result])
    record = await claim(store, lease_seconds=0.2)
    turn = make_turn(record, 0)
    await store.turns.append(turn, record.fence)
    await asyncio.sleep(0.3)
    async with TrajectoryStore.connect(mongo_uri) as other:
        assert (await other.groups.reap(3, lease_seconds=0)).num_expired == 1
        await claim(other)
    with pytest.raises(LeaseLost):
        await store.turns.set_tool_results(turn.id, record.id, record.fence, [result])


async def test_a_turn_whose_record_was_not_updated_is_finished_by_repeating(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    turn = make_turn(record, 0)
    await store.turns.append(turn, record.fence)
    await store.database["records"].update_one({"_id": record.id}, {"$set": {"turns": []}})
    await store.turns.append(turn, record.fence)
    stored = await store.records.get(record.id)
    assert stored is not None
    assert stored.turns == (turn.id,)


async def test_concurrent_writers_share_requests_and_keep_their_own_results(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0, num_generations=40)])
    records = [await claim(store) for _ in range(40)]
    stale = {record.id for record in records[::3]}
    for record in records[::3]:
        await store.records.release(record.id, record.fence)

    async def write(index: int) -> bool:
        record = records[index]
        try:
            await store.turns.append(make_turn(record, 0), record.fence)
        except StoreError:
            return False
        return True

    ok = await asyncio.gather(*(write(index) for index in range(40)))
    assert [not fine for fine in ok] == [record.id in stale for record in records]
    assert await store.database["turns"].count_documents({}) == 40 - len(stale)


async def test_a_turn_that_cannot_be_stored_fails_alone(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=5)])
    records = [await claim(store) for _ in range(5)]
    turns = [make_turn(record, 0) for record in records]
    bad = ToolCall(id="c", name="lookup", arguments={"q": object()})
    turns[2] = make_turn(records[2], 0, tool_calls=[bad])
    results = await asyncio.gather(
        *(store.turns.append(t, r.fence) for t, r in zip(turns, records, strict=True)),
        return_exceptions=True,
    )
    assert [isinstance(result, StoreError) for result in results] == [n == 2 for n in range(5)]
    assert str(results[2]).startswith("append a turn: ")
    assert await store.database["turns"].count_documents({}) == 4


async def test_a_cancelled_writer_takes_nobody_with_it(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=5)])
    records = [await claim(store) for _ in range(5)]
    writes = [
        asyncio.create_task(store.turns.append(make_turn(record, 0), record.fence))
        for record in records
    ]
    await asyncio.sleep(0)
    writes[0].cancel()
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [None] * 4


def result_of(text: str) -> ToolResult:
    return ToolResult(call_id="c", name="f", content=text)


async def test_tool_results_travel_with_the_next_turn(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=2)])
    one, other = await claim(store), await claim(store)
    first = make_turn(one, 0)
    await store.turns.append(first, one.fence)
    await store.database.handle.command("profile", 2)
    storing = asyncio.create_task(
        store.turns.set_tool_results(first.id, one.id, one.fence, [result_of("4")])
    )
    await asyncio.sleep(0)
    await store.turns.append(make_turn(other, 0), other.fence)
    await asyncio.wait_for(storing, 5)
    turns = {"ns": f"{store.database_name}.turns"}
    found = await store.database["system.profile"].find(turns).to_list()
    assert {one["op"] for one in found} == {"update"}
    (read,) = await store.turns.of_record(one.id)
    assert [result.content for result in read.tool_results] == ["4"]
    assert [turn.id for turn in await store.turns.of_record(other.id)] == [f"{other.id}/1/0"]


async def test_tool_results_without_a_next_turn_are_stored_by_themselves(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    turn = make_turn(record, 0)
    await store.turns.append(turn, record.fence)
    results = [result_of(text) for text in ("1", "2")]
    await asyncio.gather(
        *(store.turns.set_tool_results(turn.id, record.id, record.fence, results) for _ in "ab")
    )
    (read,) = await store.turns.of_record(record.id)
    assert [result.content for result in read.tool_results] == ["1", "2"]


async def test_tool_results_that_cannot_be_stored_fail_alone(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0, num_generations=3)])
    good, bad, other = [await claim(store) for _ in range(3)]
    for record in (good, bad):
        await store.turns.append(make_turn(record, 0), record.fence)
    no_id: Any = object()
    storing = [
        asyncio.create_task(
            store.turns.set_tool_results(turn_id, record.id, record.fence, [result_of("4")])
        )
        for turn_id, record in ((f"{good.id}/1/0", good), (no_id, bad))
    ]
    await asyncio.sleep(0)
    await store.turns.append(make_turn(other, 0), other.fence)
    stored, refused = await asyncio.gather(*storing, return_exceptions=True)
    assert stored is None
    assert isinstance(refused, StoreError)
    (read,) = await store.turns.of_record(good.id)
    assert [result.content for result in read.tool_results] == ["4"]


async def test_results_of_one_turn_are_stored_in_their_order_whoever_writes_them(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0)])
    record = await claim(store)
    turn = make_turn(record, 0)
    await store.turns.append(turn, record.fence)
    given = [[result_of(text) for text in "123"[:number]] for number in (1, 2, 3)]
    storing = [
        asyncio.create_task(store.turns.set_tool_results(turn.id, record.id, record.fence, results))
        for results in given
    ]
    await asyncio.sleep(0)
    storing[0].cancel()
    await asyncio.gather(*storing, return_exceptions=True)
    (read,) = await store.turns.of_record(record.id)
    assert [result.content for result in read.tool_results] == ["1", "2", "3"]


async def test_storage_grows_with_the_tokens_and_not_with_the_turns_squared(
    store: TrajectoryStore,
) -> None:
    await store.tasks.add([make_task(0, num_generations=2)])
    per_token = []
    for num_turns in (20, 200):
        record = await claim(store)
        for index in range(num_turns):
            turn = make_turn(record, index, num_added=200, num_output=100, text="word " * 100)
            await store.turns.append(turn, record.fence)
        sizes = await (
            await store.database["turns"].aggregate(
                [
                    {"$match": {"record_id": record.id}},
                    {"$group": {"_id": None, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}},
                ]
            )
        ).to_list()
        per_token.append(sizes[0]["bytes"] / (num_turns * 300))
    assert per_token[1] <= 16
    assert per_token[1] == pytest.approx(per_token[0], rel=0.05)


async def test_killing_the_server_loses_no_acknowledged_turn(tmp_path: Path) -> None:
    with EmbeddedMongo(tmp_path) as mongo:
        async with TrajectoryStore.connect(mongo.uri("run")) as store:
            await store.tasks.add([make_task(0)])
        worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(f"append {mongo.uri('run')}\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == '"ready"\n'
        acknowledged = [json.loads(worker.stdout.readline()) for _ in range(20)]
        os.kill(mongo.pid, signal.SIGKILL)
        worker.kill()
        acknowledged += [json.loads(line) for line in worker.stdout if line.endswith("\n")]
        worker.communicate()
    with EmbeddedMongo(tmp_path) as mongo:
        async with TrajectoryStore.connect(mongo.uri("run")) as store:
            turns = await store.turns.of_record("train/0/q0/0")
            record = await store.records.get("train/0/q0/0")
    assert record is not None
    assert {turn.id for turn in turns} >= set(acknowledged)
    assert set(record.turns) >= set(acknowledged)
    assert np.array_equal(turns[0].output_ids, [3])
