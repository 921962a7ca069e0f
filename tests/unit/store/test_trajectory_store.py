"""Connecting, and the schema."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from support.stored import make_task

from agentrl.errors import ConfigError, StoreError
from agentrl.schema import Run, Task
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

UNREACHABLE = "mongodb://ada:s3cret@127.0.0.1:9/demo?authSource=admin"


async def test_an_unreachable_server_is_named_in_one_line_without_the_password() -> None:
    with pytest.raises(StoreError) as caught:
        async with TrajectoryStore.connect(UNREACHABLE, server_selection_timeout=0.2):
            pass
    text = str(caught.value)
    assert "connect: MongoDB at 127.0.0.1:9 does not respond" in text
    assert "s3cret" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("http://ada:s3cret@h/x", "invalid MongoDB connection string"),
        ("mongodb://ada:s3cret@h:port/x", "invalid MongoDB connection string"),
        ("mongodb://ada:s3cret@", "invalid MongoDB connection string"),
        ("mongodb://ada:s3cret@b@h/x", "with @ : / and % in the password written as %40"),
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
    assert await store.tasks.add(slow_file()) == 1


async def test_a_database_must_be_named(mongod: EmbeddedMongo) -> None:
    with pytest.raises(ConfigError, match="no database given"):
        async with TrajectoryStore.connect(mongod.uri()):
            pass
    with pytest.raises(ConfigError, match="'my run' is not a valid database name"):
        async with TrajectoryStore.connect(mongod.uri(), "my run"):
            pass
    for uri, name in ((mongod.uri("local"), None), (mongod.uri(), "Admin")):
        with pytest.raises(ConfigError, match="is reserved by MongoDB"):
            async with TrajectoryStore.connect(uri, name):
                pass
    async with TrajectoryStore.connect(mongod.uri("from_uri")) as store:
        assert store.database_name == "from_uri"
    async with TrajectoryStore.connect(mongod.uri("from_uri"), "given") as store:
        assert store.database_name == "given"
        assert f"127.0.0.1:{mongod.port}/given?" in store.redacted_uri


async def test_the_uri_for_people_has_no_secrets(mongod: EmbeddedMongo) -> None:
    async with TrajectoryStore.connect(mongod.uri("demo")) as store:
        store.database.uri = "mongodb://ada:p:w@h:1,h:2/x?tls=true&tlsCertificateKeyFilePassword=pw"
        assert store.redacted_uri == (
            "mongodb://ada:***@h:1,h:2/demo?tls=true&tlsCertificateKeyFilePassword=***"
        )


async def test_writes_are_journaled_by_a_majority_whatever_the_uri_says(
    mongod: EmbeddedMongo,
) -> None:
    weak = mongod.uri("demo").replace("w=majority&journal=true", "w=0")
    async with TrajectoryStore.connect(weak) as store:
        assert store.database["turns"].write_concern.document == {"w": "majority", "j": True}
        assert store.database["blobs"].write_concern.document == {"w": "majority", "j": True}


async def test_preparing_twice_and_together_is_harmless(mongo_uri: str) -> None:
    async with TrajectoryStore.connect(mongo_uri) as store:
        for _ in range(2):
            await store.ensure_schema()
        names = set(await store.database.handle.list_collection_names())
        assert {"v_trajectories", "v_progress", "v_failures", "records", "turns"} <= names
        await store.drop_database()


@pytest.mark.parametrize(("version", "release"), [(1, "an earlier"), (99, "a later")])
async def test_the_database_of_another_schema_is_refused_by_name(
    store: TrajectoryStore, mongo_uri: str, version: int, release: str
) -> None:
    await store.runs.create(Run(name="run", schema_version=version))
    refusal = (
        rf"has schema version {version}, and this AgentRL uses 2: it was written by {release} "
        "release; use that release, or another --run_name$"
    )
    with pytest.raises(StoreError, match=refusal):
        await store.ensure_schema()
    with pytest.raises(StoreError, match=refusal):
        async with TrajectoryStore.connect(mongo_uri, store.database_name):
            pass
    await store.trainer_leases.acquire("trainer", "host:1:0-a", 60)
    with pytest.raises(StoreError, match=rf"it was written by AgentRL \S+, {release} release"):
        await store.ensure_schema()


async def test_documents_that_do_not_fit_are_named(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    await store.database["tasks"].update_one(
        {}, {"$set": {"order": "first"}}, bypass_document_validation=True
    )
    with pytest.raises(StoreError, match=r"'train/0/q0' is not a valid MCPTask: order"):
        await store.tasks.get("train/0/q0")
    await store.database["tasks"].update_one({}, {"$set": {"kind": "chess"}})
    with pytest.raises(StoreError, match="kind 'chess', which is not registered in this process"):
        await store.tasks.get("train/0/q0")


async def test_annotations_made_by_a_person_do_no_harm(store: TrajectoryStore) -> None:
    await store.tasks.add([make_task(0)])
    await store.database["tasks"].update_one({}, {"$set": {"note": "interesting"}})
    task = await store.tasks.get("train/0/q0")
    assert isinstance(task, Task)
