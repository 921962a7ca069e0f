"""Determines which shards the store's operations would reach, by the collections' shard key.

    python benchmarks/shard_keys.py --out benchmarks/results/shard_keys.json

A small run uses the real store on a real mongod, and the driver's commands are recorded. The filter
of a command and the shard key determine how a router of MongoDB 6.0 handles it, by the manual's rules
(Operational Restrictions in Sharded Clusters; Shard Keys):

- equality on the key reaches one shard, a list of values the shards of these values, any other
  condition every shard
- `findAndModify` and an upsert need equality on the key
- an update or deletion of one document needs the key or `_id`; with `_id` alone it reaches every shard
- a unique index must begin with the key

This script applies the rules itself, because no package that this project installs contains `mongos`.
"""

import argparse
import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from harness.machine import machine
from harness.trees import make_turn
from pymongo import AsyncMongoClient
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from agentrl.schema import MCPTask, Run, Score, ToolResult
from agentrl.store import TrajectoryStore
from agentrl.store.collections.indexes import INDEXES
from agentrl.store.private_mongod import EmbeddedMongo

Reach = Literal["one shard", "shards of a list", "all shards", "refused"]
_WORST: tuple[Reach, ...] = ("one shard", "shards of a list", "all shards", "refused")
Keys = Mapping[str, str]
"""Field by collection; other collections are not sharded."""
KEYS: dict[str, Keys] = {
    "task": {"tasks": "_id", "records": "task_id", "record_data": "task_id", "turns": "task_id"},
    "id": {"tasks": "_id", "records": "_id", "record_data": "_id", "turns": "_id"},
    "none": {},
}
"""Sharded by group, sharded by document, and a run without sharded collections."""
_FILTERS = {"find": "filter", "distinct": "query", "count": "query"}
_GROUPS, _GENERATIONS = 3, 2


def reach(command: Mapping[str, Any], keys: Keys) -> Reach | None:
    """Return which shards a command would reach; None if its collection is not sharded."""
    name = next(iter(command))
    key = keys.get(str(command[name]))
    if key is None:
        return None
    return max(_reaches(name, command, key), key=_WORST.index, default=None)


def _reaches(name: str, command: Mapping[str, Any], key: str) -> Iterator[Reach]:
    if name == "insert":
        for document in command["documents"]:
            yield "one shard" if key in document else "refused"
    elif name == "findAndModify":
        found = _of_filter(command["query"], key)
        yield found if found == "one shard" else "refused"
    elif name in ("update", "delete"):
        for one in command["updates" if name == "update" else "deletes"]:
            is_single = one.get("limit") == 1 if name == "delete" else not one.get("multi")
            yield _of_write(one["q"], key, is_single=is_single, upsert=bool(one.get("upsert")))
    elif name == "aggregate":
        first = (command["pipeline"] or [{}])[0]
        yield _of_filter(first.get("$match", {}), key)
    elif name in _FILTERS:
        yield _of_filter(command.get(_FILTERS[name], {}), key)


def _of_write(condition: Mapping[str, Any], key: str, *, is_single: bool, upsert: bool) -> Reach:
    found = _of_filter(condition, key)
    if found == "one shard" or not (is_single or upsert):
        return found
    has_id = _of_filter(condition, "_id") == "one shard"
    return "all shards" if has_id and not upsert else "refused"


def _of_filter(condition: Mapping[str, Any], key: str) -> Reach:
    value = condition.get(key)
    if isinstance(value, Mapping):
        if "$in" in value:
            return "one shard" if len(value["$in"]) == 1 else "shards of a list"
        return "one shard" if "$eq" in value else "all shards"
    return "all shards" if value is None else "one shard"


def refused_indexes(keys: Keys) -> list[str]:
    """Return the unique indexes with which a collection cannot be sharded by its key."""
    return [
        f"{collection}.{index.document['name']}"
        for collection, key in keys.items()
        for index in INDEXES.get(collection, ())
        if index.document.get("unique") and next(iter(index.document["key"])) != key
    ]


class Recorder(CommandListener):
    """Keeps the commands of each operation."""

    def __init__(self) -> None:
        self.operation = ""
        self.commands: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def started(self, event: CommandStartedEvent) -> None:
        """Record a command; the commands of a login are empty."""
        if self.operation and event.command:
            self.commands[self.operation].append(dict(event.command))

    def succeeded(self, event: CommandSucceededEvent) -> None:
        """Keep no answers."""

    def failed(self, event: CommandFailedEvent) -> None:
        """Keep no answers."""


@asynccontextmanager
async def recorded(uri: str, name: str, recorder: Recorder) -> AsyncIterator[TrajectoryStore]:
    """Open a store whose commands are recorded."""
    async with AsyncMongoClient[Any](uri, tz_aware=True, event_listeners=[recorder]) as client:
        store = TrajectoryStore.from_client(client, name)
        await store.ensure_schema()
        await store.runs.create(Run(name=name, status="training", admitted_groups=10**6))
        yield store


async def play(store: TrajectoryStore, recorder: Recorder) -> None:
    """Run a small training run, and name its operations for the recorder."""
    lease: dict[str, Any] = {"lease_seconds": 600.0}
    recorder.operation = "add tasks"
    await store.tasks.add(
        MCPTask(id=f"train/0/q{n}", order=n, num_generations=_GENERATIONS, query="3 + 4?")
        for n in range(_GROUPS)
    )
    for number in range(_GROUPS * _GENERATIONS):
        recorder.operation = "claim a slot"
        found = await store.records.claim("me", admitted_groups=10**6, max_attempts=2, **lease)
        assert found is not None
        record = found[0]
        if number == 0:
            recorder.operation = "end a failed attempt"
            await store.records.fail_attempt(record.id, record.fence, "no answer", 2)
            recorder.operation = ""
            again = await store.records.claim("me", admitted_groups=10**6, max_attempts=2, **lease)
            assert again is not None
            record = again[0]
        recorder.operation = "renew leases"
        await store.records.renew([(record.id, record.fence)], 600.0)
        turns = [
            make_turn(record.id, index, [1, 2], [3, 4], parent=index - 1 if index else None)
            for index in range(2)
        ]
        turns = [
            turn.model_copy(
                update={"id": f"{record.id}/{record.fence}/{turn.index}", "attempt": record.attempt}
            )
            for turn in turns
        ]
        recorder.operation = "append a turn"
        await store.turns.append(turns[0], record.fence)
        recorder.operation = "append a turn with results of another"
        result = ToolResult(call_id="c", name="add", content="7")
        await asyncio.gather(
            store.turns.set_tool_results(turns[0].id, record.id, record.fence, [result]),
            store.turns.append(turns[1], record.fence),
        )
        recorder.operation = "finish a rollout"
        await store.records.finish(
            record.id, record.fence, outcome="answered", final_answer="7", **lease
        )
        recorder.operation = "store a score, complete a group"
        await store.scores.set(record.id, record.fence, Score(scorer="exact", value=1.0))
    recorder.operation = "claim a scoring"
    assert await store.scores.claim("me", 600.0) is None
    recorder.operation = "reap"
    await store.groups.reap(2, lease_seconds=600.0)
    recorder.operation = "read ready groups"
    groups = await store.ledger.ready_groups(limit=_GROUPS)
    assert len(groups) == _GROUPS
    recorder.operation = ""
    await store.trainer_leases.acquire("trainer", "me", lease_seconds=600.0)
    ids = [data.record_id for group in groups for data in group]
    recorder.operation = "reserve records"
    await store.ledger.reserve("trainer", ids[:-1], 1)
    recorder.operation = "drop records"
    await store.ledger.drop("trainer", ids[-1:], 1, "stale")
    recorder.operation = "commit the ledger"
    await store.ledger.commit("trainer", 1)
    recorder.operation = ""


def reached(commands: Mapping[str, list[dict[str, Any]]], keys: Keys) -> dict[str, dict[str, str]]:
    """Return the widest reach by operation and command."""
    found: dict[str, dict[str, str]] = {}
    for operation, all_of_it in commands.items():
        row: dict[str, Reach] = {}
        for command in all_of_it:
            name = next(iter(command))
            shards = reach(command, keys)
            if shards is not None:
                label = f"{name} {command[name]}"
                row[label] = max(row.get(label, shards), shards, key=_WORST.index)
        found[operation] = dict(row)
    return found


async def record() -> Mapping[str, list[dict[str, Any]]]:
    """Run on a separate mongod; return the commands."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder, EmbeddedMongo(Path(folder)) as mongo:
        async with recorded(mongo.uri(), "shards", recorder) as store:
            await play(store, recorder)
    return recorder.commands


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/shard_keys.json"))
    arguments = parser.parse_args()
    commands = asyncio.run(record())
    result = {
        "keys": {
            name: {
                "fields": keys,
                "refused_indexes": refused_indexes(keys),
                "operations": reached(commands, keys),
            }
            for name, keys in KEYS.items()
        },
        "machine": machine(),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
