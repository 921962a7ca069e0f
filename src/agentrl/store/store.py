"""`TrajectoryStore`: the only door to MongoDB.

Documents of `agentrl.schema` go in and come out; nothing of the driver is seen outside. Every
method may be called from any number of processes at once. The parts stand in modules of their own:
runs, tasks, slots, turns, images, scoring, groups, ledger, processes, progress.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import ConfigurationError, ConnectionFailure, InvalidName
from pymongo.write_concern import WriteConcern

from agentrl.errors import ConfigError
from agentrl.store.codec import Document
from agentrl.store.door import boundary, operation
from agentrl.store.indexes import INDEXES, ledger_indexes
from agentrl.store.inspection import InspectionDoor
from agentrl.store.ledger import DEFAULT_CONSUMER
from agentrl.store.maintenance import MaintenanceDoor
from agentrl.store.migrations import migrate
from agentrl.store.motor import MotorDatabase, is_motor
from agentrl.store.processes import ProcessDoor
from agentrl.store.runs import RunDoor
from agentrl.store.scoring import ScoringDoor
from agentrl.store.tasks import TaskDoor
from agentrl.store.transfer import TransferDoor
from agentrl.store.validators import ensure_validators
from agentrl.store.views import ensure_views

DURABLE = WriteConcern(w="majority", j=True)
"""An acknowledged write survives the death of any process and of a minority of the servers."""
SETTLE_SECONDS = 0.05
_AWARE: CodecOptions[Document] = CodecOptions(tz_aware=True)
_GIVEN_CLIENT = "the-address-of-the-given-client"


class TrajectoryStore(
    RunDoor,
    TaskDoor,
    ScoringDoor,
    InspectionDoor,
    ProcessDoor,
    TransferDoor,
    MaintenanceDoor,
):
    """The run's database.

    Example:
        async with TrajectoryStore.connect("mongodb://127.0.0.1:27417/demo") as store:
            await store.ensure_schema()
            await store.add_tasks([MCPTask(id="train/0/q1", query="...", num_generations=8)])
    """

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, uri: str, database: str | None = None, *, server_selection_timeout: float = 5.0
    ) -> AsyncIterator[Self]:
        """Connect, check that the server answers, and close on exit.

        Args:
            uri: MongoDB connection string. Writes are majority-acknowledged and journaled whatever
                it says.
            database: name of the database; the one that the URI names when not given.
            server_selection_timeout: seconds to wait for a server that takes writes.

        Raises:
            ConfigError: the URI is malformed, or no database is named.
            StoreError: no server answers, or it refuses the login.
        """
        client = _client(uri, server_selection_timeout)
        try:
            await _check_reachable(client, uri)
            yield cls(client, _database(client, database), uri)
        finally:
            await client.close()

    @classmethod
    def from_client(cls, client: Any, database: str | None = None) -> Self:
        """Use a client that the caller made, and will close.

        Args:
            client: PyMongo's `AsyncMongoClient` or Motor's `AsyncIOMotorClient`. Writes are
                majority-acknowledged and journaled whatever its own settings are.
            database: name of the database; the one that the client's URI names when not given.

        Raises:
            ConfigError: no database is named.
        """
        found: Any = _database(client, database)
        if is_motor(client):
            found = MotorDatabase(found)
        return cls(client, found, f"mongodb://{_GIVEN_CLIENT}/")

    @operation("prepare the database")
    async def ensure_schema(self) -> None:
        """Create or bring up to date the validators, indexes and views; migrate an older schema.

        Raises:
            StoreError: a newer release wrote the database.
        """
        await migrate(self._db)
        await ensure_validators(self._db)
        for collection, indexes in INDEXES.items():
            await self._db[collection].create_indexes(indexes)
        await self._record_data.create_indexes(ledger_indexes(DEFAULT_CONSUMER))
        await ensure_views(self._db)

    @operation("drop the database")
    async def drop_database(self) -> None:
        """Delete the whole database of the run. Nothing in AgentRL does so unasked."""
        await self._client.drop_database(self._db.name)


async def _check_reachable(client: AsyncMongoClient[Document], uri: str) -> None:
    async with boundary("connect", uri):
        try:
            await client.admin.command("ping")
        except ConnectionFailure:
            # The driver forgets a socket that is still connecting when its client is closed; a
            # refused connection is over in a moment.
            await asyncio.sleep(SETTLE_SECONDS)
            raise


def _client(uri: str, server_selection_timeout: float) -> AsyncMongoClient[Document]:
    try:
        return AsyncMongoClient(
            uri,
            tz_aware=True,
            appname="agentrl",
            serverSelectionTimeoutMS=round(server_selection_timeout * 1000),
        )
    except (ConfigurationError, ValueError) as error:
        # The driver's text may repeat the URI, so only its kind is shown.
        raise ConfigError(
            f"the MongoDB connection string cannot be read ({type(error).__name__}); "
            "it looks like mongodb://user:password@host:27017/database"
        ) from None


def _database(client: AsyncMongoClient[Document], name: str | None) -> AsyncDatabase[Document]:
    try:
        if name is not None:
            return client.get_database(name, write_concern=DURABLE, codec_options=_AWARE)
        return client.get_default_database(write_concern=DURABLE, codec_options=_AWARE)
    except InvalidName as error:
        raise ConfigError(f"{name!r} cannot be the name of a database: {error}") from error
    except ConfigurationError as error:
        raise ConfigError(
            "no database is named: give a run name, or a URI with /database"
        ) from error
