"""Connecting, the schema, and the plans of hot queries."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.stored import claim, fill, make_task, play

from agentrl.errors import ConfigError, StoreError
from agentrl.schema import Run, Task
from agentrl.store import TrajectoryStore
from agentrl.store.embedded import EmbeddedMongo
from agentrl.store.expressions import LEASE_EXPIRED
from agentrl.store.groups import TERMINAL, UNFINISHED
from agentrl.store.slots import CLAIM_ORDER, claim_filter, claim_update

UNREACHABLE = "mongodb://ada:s3cret@127.0.0.1:9/demo?authSource=admin"


async def test_an_unreachable_server_is_named_in_one_line_without_the_password() -> None:
    with pytest.raises(StoreError) as caught:
        async with TrajectoryStore.connect(UNREACHABLE, server_selection_timeout=0.2):
            pass
    text = str(caught.value)
    assert "connect: MongoDB at 127.0.0.1:9 does not answer" in text
    assert "s3cret" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("http://ada:s3cret@h/x", "cannot be read"),
        ("mongodb://ada:s3cret@h:port/x", "cannot be read"),
        ("mongodb://ada:s3cret@", "cannot be read"),
    ],
)
async def test_a_malformed_uri_is_a_config_error_without_the_password(
    uri: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        async with TrajectoryStore.connect(uri, "run"):
            pass
    assert "s3cret" not in str(caught.value)


async def test_other_work_goes_on_while_tasks_are_read(store: TrajectoryStore) -> None:
    goes_on = threading.Event()

    def slow_file() -> Iterator[Task]:
        assert goes_on.wait(10), "nothing else had its turn"
        yield make_task(0)

    asyncio.get_running_loop().call_later(0.05, goes_on.set)
    assert await store.add_tasks(slow_file()) == 1


async def test_a_database_must_be_named(mongod: EmbeddedMongo) -> None:
    with pytest.raises(ConfigError, match="no database is named"):
        async with TrajectoryStore.connect(mongod.uri()):
            pass
    with pytest.raises(ConfigError, match="'my run' cannot be the name of a database"):
        async with TrajectoryStore.connect(mongod.uri(), "my run"):
            pass
    async with TrajectoryStore.connect(mongod.uri("from_uri")) as store:
        assert store.database_name == "from_uri"
    async with TrajectoryStore.connect(mongod.uri("from_uri"), "given") as store:
        assert store.database_name == "given"
        assert f"127.0.0.1:{mongod.port}/given?" in store.uri_for_people()


async def test_the_uri_for_people_has_no_secrets(mongod: EmbeddedMongo) -> None:
    async with TrajectoryStore.connect(mongod.uri("demo")) as store:
        store._uri = "mongodb://ada:p:w@h:1,h:2/x?tls=true&tlsCertificateKeyFilePassword=pw"
        assert store.uri_for_people() == (
            "mongodb://ada:***@h:1,h:2/demo?tls=true&tlsCertificateKeyFilePassword=***"
        )


async def test_writes_are_journaled_by_a_majority_whatever_the_uri_says(
    mongod: EmbeddedMongo,
) -> None:
    weak = f"mongodb://127.0.0.1:{mongod.port}/demo?w=0&directConnection=true"
    async with TrajectoryStore.connect(weak) as store:
        assert store._turns.write_concern.document == {"w": "majority", "j": True}
        assert store._db["blobs"].write_concern.document == {"w": "majority", "j": True}


async def test_preparing_twice_and_together_is_harmless(mongo_uri: str) -> None:
    async with TrajectoryStore.connect(mongo_uri) as store:
        for _ in range(2):
            await store.ensure_schema()
        names = set(await store._db.list_collection_names())
        assert {"v_trajectories", "v_progress", "v_failures", "records", "turns"} <= names
        await store.drop_database()


async def test_another_schema_version_is_refused(store: TrajectoryStore) -> None:
    await store.create_run(Run(name="run", schema_version=99))
    with pytest.raises(StoreError, match="has schema version 99, this AgentRL needs 2"):
        await store.ensure_schema()


async def test_documents_that_do_not_fit_are_named(store: TrajectoryStore) -> None:
    await store.add_tasks([make_task(0)])
    await store._tasks.update_one({}, {"$set": {"order": "first"}}, bypass_document_validation=True)
    with pytest.raises(StoreError, match=r"'train/0/q0' is no valid MCPTask: order"):
        await store.task("train/0/q0")
    await store._tasks.update_one({}, {"$set": {"kind": "chess"}})
    with pytest.raises(StoreError, match="kind 'chess', which is not registered here"):
        await store.task("train/0/q0")


async def test_annotations_made_by_a_person_do_no_harm(store: TrajectoryStore) -> None:
    await store.add_tasks([make_task(0)])
    await store._tasks.update_one({}, {"$set": {"note": "interesting"}})
    task = await store.task("train/0/q0")
    assert isinstance(task, Task)


def stages(plan: Any) -> Iterator[str]:
    """Names of all stages of a query plan."""
    if isinstance(plan, dict):
        if "stage" in plan:
            yield plan["stage"]
        for value in plan.values():
            yield from stages(value)
    elif isinstance(plan, list):
        for value in plan:
            yield from stages(value)


def hot_queries() -> dict[str, dict[str, Any]]:
    """Commands as the store sends them, by name."""
    ledger = "ledger.trainer"

    def find(collection: str, query: dict[str, Any], **options: Any) -> dict[str, Any]:
        return {"find": collection, "filter": query, **options}

    def update(collection: str, query: dict[str, Any]) -> dict[str, Any]:
        changes = {"q": query, "u": {"$set": {"x": 1}}, "multi": True}
        return {"update": collection, "updates": [changes]}

    def distinct(query: dict[str, Any]) -> dict[str, Any]:
        return {"distinct": "records", "key": "task_id", "query": query}

    return {
        "claim": {
            "findAndModify": "records",
            "query": claim_filter(10, None),
            "sort": dict(CLAIM_ORDER),
            "update": claim_update("me", 60),
        },
        "claim of a split": {
            "findAndModify": "records",
            "query": claim_filter(10, ["eval"]),
            "sort": dict(CLAIM_ORDER),
            "update": claim_update("me", 60),
        },
        "expired leases": find("records", {"status": "running", **LEASE_EXPIRED}),
        "claim scoring": find(
            "records", {"status": "finished", **LEASE_EXPIRED}, sort={"lease.expires_at": 1}
        ),
        "unfinished of a group": distinct(
            {"task_id": {"$in": ["train/0/q0"]}, "status": {"$in": UNFINISHED}}
        ),
        "open groups": distinct({"group_open": True, "status": TERMINAL}),
        "records of a group": find("records", {"task_id": "train/0/q0"}, sort={"traj_id": 1}),
        "close a group": update("records", {"task_id": "train/0/q0", "group_open": True}),
        "promote": update("record_data", {"task_id": "train/0/q0", "group_completed": False}),
        "turns of an attempt": find(
            "turns", {"record_id": "train/0/q0/0", "attempt": 1}, sort={"index": 1}
        ),
        "turns by id": find("turns", {"_id": {"$in": ["train/0/q0/0/1/0"]}}),
        "next order": find("tasks", {"split": "train"}, sort={"order": -1}, limit=1),
        "tasks of a tag": find("tasks", {"tag": "eval@3"}),
        "ready groups": find(
            "record_data",
            {"split": "train", "group_completed": True, f"{ledger}.status": None},
            sort={"order": 1, "traj_id": 1},
        ),
        "records of ready groups": find(
            "record_data", {"task_id": {"$in": ["train/0/q0", "train/0/q1"]}}
        ),
        "consumed groups": find(
            "record_data",
            {
                "traj_id": 0,
                f"{ledger}.status": {"$in": ["dropped", "trained"]},
                "split": "train",
            },
        ),
        "commit": update(
            "record_data", {f"{ledger}.status": "reserved", f"{ledger}.step": {"$lte": 3}}
        ),
        "recover": update(
            "record_data",
            {
                f"{ledger}.status": {"$in": ["dropped", "reserved", "trained"]},
                f"{ledger}.step": {"$gt": 3},
            },
        ),
    }


async def test_hot_queries_scan_no_collection_and_sort_nothing(store: TrajectoryStore) -> None:
    record_ids = await fill(store, 20)
    await store.add_tasks(make_task(number) for number in range(20, 60))
    await store.reserve("trainer", record_ids[:8], 1)
    await store.commit("trainer", 1)
    await claim(store)
    await play(store, await claim(store), score=None)
    for name, command in hot_queries().items():
        plan = await store._db.command({"explain": command, "verbosity": "queryPlanner"})
        used = set(stages(plan["queryPlanner"]["winningPlan"]))
        assert "COLLSCAN" not in used, name
        assert "SORT" not in used, name
        assert used & {"IXSCAN", "IDHACK", "DISTINCT_SCAN"}, f"{name}: {used}"
