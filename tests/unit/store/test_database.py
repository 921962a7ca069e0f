"""Clients that a caller hands in, PyMongo's own and Motor's, and servers that fail for a moment."""

from collections.abc import Callable, Iterator
from datetime import UTC
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import BulkWriteError, ConfigurationError, WriteError
from support.mongod_programs import mongod_program
from support.stored import fill, make_task

from agentrl.errors import ConfigError, StoreUnreachable
from agentrl.schema import Run
from agentrl.store import TrajectoryStore
from agentrl.store.database import RunDatabase, connected, unencrypted_hosts
from agentrl.store.private_mongod import EmbeddedMongo

QUICK = "heartbeatFrequencyMS=500"
"""A primary that only says that it left is known to be one with the next heartbeat."""


def motor_client(uri: str) -> Any:
    motor = pytest.importorskip("motor.motor_asyncio", reason="motor is not installed")
    return motor.AsyncIOMotorClient(uri)


@pytest.mark.parametrize("make", [AsyncMongoClient, motor_client])
async def test_a_given_client_serves_the_whole_life_of_a_group(
    make: Callable[[str], Any], mongo_uri: str
) -> None:
    client = make(mongo_uri)
    try:
        store = TrajectoryStore.from_client(client)
        await store.ensure_schema()
        await store.runs.create(Run(name="run"))
        ids = await fill(store, 2, num_turns=2)
        (group, _) = await store.ledger.ready_groups(limit=2)
        assert [data.record_id for data in group] == ids[:2]
        assert [len(data.turns) for data in group] == [2, 2]
        assert group[0].created_at.tzinfo is not None
        assert group[0].created_at.utcoffset() == UTC.utcoffset(None)
        await store.trainer_leases.acquire("trainer", "me", 30)
        await store.ledger.reserve("trainer", ids[:2], 1)
        assert await store.ledger.commit("trainer", 1) == 2
        await store.runs.update_control("me", max_staleness=2)
        assert (await store.reports.progress()).num_groups_consumed == 1
        assert [record.id async for record in store.records.find()] == ids
        assert store.database["turns"].write_concern.document == {"w": "majority", "j": True}
        await store.drop_database()
    finally:
        closing = client.close()
        if closing is not None:
            await closing


@pytest.mark.parametrize(
    ("uri", "hosts"),
    [
        ("mongodb://127.0.0.1:1,[::1]:1,localhost/run", []),
        ("mongodb://u:p@10.0.0.7:1,db.example:1,localhost/run", ["10.0.0.7", "db.example"]),
        ("mongodb://10.0.0.7:1/run?tls=false", ["10.0.0.7"]),
        ("mongodb://10.0.0.7:1/run?tls=true", []),
        ("mongodb://10.0.0.7:1/run?tlsCAFile=ca.pem", []),
        ("mongodb+srv://db.example/run", []),
        ("mongodb://%2Ftmp%2Fmongodb.sock/run", []),
    ],
)
def test_hosts_beyond_this_machine_are_to_be_spoken_to_with_tls(uri: str, hosts: list[str]) -> None:
    assert unencrypted_hosts(uri) == hosts


async def test_mongodb_in_the_clear_is_said(
    mongo_uri: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.store.database.is_loopback", lambda host: False)
    async with connected(mongo_uri, None, 5.0):
        pass
    assert "MongoDB at 127.0.0.1 without TLS" in caplog.text


async def test_a_given_client_needs_a_database(mongod: EmbeddedMongo) -> None:
    async with AsyncMongoClient[dict[str, Any]](mongod.uri()) as client:
        with pytest.raises(ConfigError, match="no database given"):
            TrajectoryStore.from_client(client)
        store = TrajectoryStore.from_client(client, "given")
        assert await store.tasks.add([make_task(0)]) == 1
        await store.drop_database()


async def test_a_host_that_cannot_be_looked_up_may_be_there_later() -> None:
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(connect=False)
    database = RunDatabase(client, client["x"], "mongodb+srv://ada:s3cret@db.example/x")
    with pytest.raises(StoreUnreachable) as caught:
        async with database.boundary("connect"):
            raise ConfigurationError("The DNS query name does not exist: _mongodb._tcp.db.example.")
    assert str(caught.value) == (
        "connect: MongoDB at db.example: The DNS query name does not exist: _mongodb._tcp.db.example; "
        "check the address"
    )
    await client.close()


@pytest.mark.parametrize("is_bulk", [False, True])
async def test_a_full_disk_passes_once_there_is_space(is_bulk: bool) -> None:
    refused: dict[str, Any] = {"index": 0, "code": 8, "errmsg": "28: No space left on device"}
    error = (
        BulkWriteError({"writeErrors": [refused]})
        if is_bulk
        else WriteError(refused["errmsg"], 8, refused)
    )
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(connect=False)
    database = RunDatabase(client, client["x"], "mongodb://ada:s3cret@db.example/x")
    with pytest.raises(StoreUnreachable) as caught:
        async with database.boundary("store a turn"):
            raise error
    assert str(caught.value) == (
        "store a turn: the disk of MongoDB at db.example is full; free some space on it"
    )
    await client.close()


@pytest.fixture(scope="module")
def failing_mongod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedMongo]:
    """A mongod that can be told to fail."""
    folder = tmp_path_factory.mktemp("failing")
    program = mongod_program(folder, flags="--setParameter enableTestCommands=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONGOD_BINARY", str(program))
        with EmbeddedMongo(folder / "data") as mongo:
            yield mongo


def fail(mongo: EmbeddedMongo, command: str, times: int, **how: object) -> None:
    """Let the server fail a command so many times."""
    data = {"failCommands": [command], **how}
    with mongo._internal_client() as client:
        client.admin.command("configureFailPoint", "failCommand", mode={"times": times}, data=data)


def leave(mongo: EmbeddedMongo, command: str, code: int, times: int) -> None:
    """Let it carry out the command, and say that its primary left before it was confirmed."""
    error = {"code": code, "errmsg": "interrupted"}
    fail(mongo, command, times, writeConcernError=error)


async def test_a_server_that_cannot_check_signed_times_yet_is_waited_for(
    failing_mongod: EmbeddedMongo,
) -> None:
    async with TrajectoryStore.connect(failing_mongod.uri("keys")) as store:
        await store.ensure_schema()
        fail(failing_mongod, "insert", times=2, errorCode=211)
        assert await store.tasks.add([make_task(0)]) == 1


@pytest.mark.parametrize("code", [11602, 189, 91])
async def test_a_primary_that_leaves_while_a_write_is_confirmed_is_waited_for(
    failing_mongod: EmbeddedMongo, code: int
) -> None:
    async with TrajectoryStore.connect(f"{failing_mongod.uri(f'run{code}')}&{QUICK}") as store:
        await store.ensure_schema()
        await store.runs.create(Run(name="run"))
        ids = await fill(store, 2, num_turns=1)
        leave(failing_mongod, "insert", code, times=2)
        assert await store.tasks.add([make_task(7), make_task(8)]) in (0, 2)
        assert await store.tasks.get("train/0/q8") is not None
        await store.trainer_leases.acquire("trainer", "me", 30)
        leave(failing_mongod, "update", code, times=2)
        await store.ledger.reserve("trainer", ids[:2], 1)
        assert await store.ledger.commit("trainer", 1) == 2


async def test_an_outage_beyond_the_default_is_ridden_out_and_logged_once(
    failing_mongod: EmbeddedMongo, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"{failing_mongod.uri('outage')}&{QUICK}"
    async with TrajectoryStore.connect(uri, outage_seconds=300) as store:
        await store.ensure_schema()
        fail(failing_mongod, "find", times=7, errorCode=11602)
        assert [await store.tasks.get("train/0/q0"), await store.tasks.get("x")] == [None, None]
    notices = [line for line in caplog.messages if "retrying for up to 300 s" in line]
    assert len(notices) == 1
    assert notices[0].startswith("MongoDB at 127.0.0.1:")


async def test_a_primary_that_does_not_come_back_is_told_as_one_that_may(
    failing_mongod: EmbeddedMongo,
) -> None:
    uri = f"{failing_mongod.uri('gone')}&{QUICK}"
    async with TrajectoryStore.connect(uri, outage_seconds=0.5) as store:
        await store.ensure_schema()
        leave(failing_mongod, "insert", 11602, times=20)
        with pytest.raises(
            StoreUnreachable, match=r"add (the slots of )?tasks: MongoDB at .* does not respond"
        ):
            await store.tasks.add([make_task(0), make_task(1)])
        leave(failing_mongod, "insert", 11602, times=0)
