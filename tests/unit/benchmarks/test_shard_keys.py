"""What a router would do with the store's commands, and runs on replica sets of their own."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from shard_keys import KEYS, Recorder, play, reach, reached, record, recorded, refused_indexes

from agentrl.store.private_mongod import EmbeddedMongo

RESULT = Path(__file__).parents[3] / "benchmarks/results/shard_keys.json"
BY_TASK = {"records": "task_id"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ({"find": "records", "filter": {"task_id": "a"}}, "one shard"),
        ({"find": "records", "filter": {"task_id": {"$eq": "a"}}}, "one shard"),
        ({"find": "records", "filter": {"task_id": {"$in": ["a"]}}}, "one shard"),
        ({"find": "records", "filter": {"task_id": {"$in": ["a", "b"]}}}, "shards of a list"),
        ({"find": "records", "filter": {"task_id": {"$gt": "a"}}}, "all shards"),
        ({"find": "records"}, "all shards"),
        ({"distinct": "records", "key": "x", "query": {"task_id": "a"}}, "one shard"),
        ({"aggregate": "records", "pipeline": [{"$match": {"task_id": "a"}}]}, "one shard"),
        ({"aggregate": "records", "pipeline": []}, "all shards"),
        ({"insert": "records", "documents": [{"task_id": "a"}]}, "one shard"),
        ({"insert": "records", "documents": [{"task_id": "a"}, {}]}, "refused"),
        ({"findAndModify": "records", "query": {"task_id": "a", "status": "x"}}, "one shard"),
        ({"findAndModify": "records", "query": {"_id": "a"}}, "refused"),
        ({"update": "records", "updates": [{"q": {"_id": "a"}}]}, "all shards"),
        ({"update": "records", "updates": [{"q": {"_id": "a"}, "upsert": True}]}, "refused"),
        ({"update": "records", "updates": [{"q": {"status": "x"}}]}, "refused"),
        ({"update": "records", "updates": [{"q": {"status": "x"}, "multi": True}]}, "all shards"),
        ({"delete": "records", "deletes": [{"q": {"status": "x"}, "limit": 0}]}, "all shards"),
        ({"delete": "records", "deletes": [{"q": {"status": "x"}, "limit": 1}]}, "refused"),
        ({"find": "runs", "filter": {}}, None),
        ({"getMore": 1, "collection": "records"}, None),
    ],
)
def test_reach_follows_the_manual(command: dict[str, Any], expected: str | None) -> None:
    assert reach(command, BY_TASK) == expected


async def test_no_key_of_today_serves_claims_and_the_result_says_so() -> None:
    commands = await record()
    stored = json.loads(RESULT.read_text())["keys"]
    for name, keys in KEYS.items():
        assert stored[name]["operations"] == reached(commands, keys)
        assert stored[name]["refused_indexes"] == refused_indexes(keys)
    by_task = stored["task"]["operations"]
    assert by_task["claim a slot"]["findAndModify records"] == "refused"
    completion = by_task["store a score, complete a group"]
    assert completion.pop("update records") == "all shards"  # the score, found by `_id`
    assert set(completion.values()) == {"one shard"}
    assert refused_indexes(KEYS["task"]) == ["tasks.one_order"]
    assert not any(stored["none"]["operations"].values())


async def test_runs_on_replica_sets_of_their_own_load_one_each(tmp_path: Path) -> None:
    with EmbeddedMongo(tmp_path / "a") as first, EmbeddedMongo(tmp_path / "b") as second:
        uris = {"one": first.uri(), "two": second.uri()}
        recorders = {name: Recorder() for name in uris}
        for name, uri in uris.items():
            async with recorded(uri, name, recorders[name]) as store:
                await play(store, recorders[name])
                assert await store.tasks.count(status="completed") == 3
        touched = {}
        for name, uri in uris.items():
            async with AsyncMongoClient[Any](uri) as client:
                totals = (await client.admin.command("top"))["totals"]
            counts: Counter[str] = Counter()
            for namespace, one in totals.items():
                if isinstance(one, dict):
                    counts[namespace.partition(".")[0]] += one["total"]["count"]
            touched[name] = {run for run in uris if counts[run]}
        assert touched == {"one": {"one"}, "two": {"two"}}
