"""`TrajectoryStore`: the only access to MongoDB, composed of one repository per concept.

Documents of `agentrl.schema` go in and come out; types of the driver stay inside. Every method may
be called from any number of processes concurrently.
"""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from agentrl.store.collections.indexes import INDEXES, ledger_indexes
from agentrl.store.collections.validators import ensure_validators
from agentrl.store.collections.views import ensure_views
from agentrl.store.database import (
    OUTAGE_SECONDS,
    SELECTION_SECONDS,
    RunDatabase,
    connected,
    given_database,
    operation,
)
from agentrl.store.repositories.audit_log import AuditRepository
from agentrl.store.repositories.blobs import BlobRepository, ImageRepository, SnapshotRepository
from agentrl.store.repositories.fenced_records import FencedRecords
from agentrl.store.repositories.fleet import (
    PolicyRepository,
    SamplerRepository,
    ServiceRepository,
)
from agentrl.store.repositories.forks import ForkRepository, is_of_fork
from agentrl.store.repositories.ledger import LedgerRepository
from agentrl.store.repositories.records import RecordRepository
from agentrl.store.repositories.runs import (
    DEFAULT_CONSUMER,
    RunRepository,
    TrainerLeaseRepository,
)
from agentrl.store.repositories.scores import ScoreRepository
from agentrl.store.repositories.task_groups import GroupRepository, TaskRepository
from agentrl.store.repositories.teaching import TeachingRepository
from agentrl.store.repositories.turns import TurnRepository
from agentrl.store.repositories.unused_blobs import UnusedBlobs
from agentrl.store.views.figures import FigureRepository

if TYPE_CHECKING:
    from agentrl.store.repositories.maintenance import MaintenanceRepository
    from agentrl.store.repositories.retention import RetentionRepository
    from agentrl.store.repositories.transfer import TransferRepository
    from agentrl.store.views.behavior import BehaviorRepository
    from agentrl.store.views.browsing import BrowseRepository
    from agentrl.store.views.lineage import LineageRepository
    from agentrl.store.views.reports import ReportRepository


class TrajectoryStore:
    """The run's database.

    Example:
        async with TrajectoryStore.connect("mongodb://127.0.0.1:27417/demo") as store:
            await store.ensure_schema()
            await store.tasks.add([MCPTask(id="train/0/q1", query="...", num_generations=8)])

    Attributes:
        database: the stored documents, for tools and tests that bypass the schema.
        clock: the server's time.
        runs: the run itself: identity, controls, status, admission.
        trainer_leases: which process trains the run.
        tasks: the questions, with the pending Records that belong to them.
        groups: completion of a Task when all its Records have ended, and repair after crashes.
        records: claiming, renewing, finishing and failing Records.
        turns: the model calls of Records.
        images: images by the hash of their content.
        snapshots: states of tools and environments, from which branches start.
        scores: scoring of finished Records.
        ledger: the records that a trainer reserved, trained and dropped, by step.
        teaching: teachers, and their logprobs at sampled tokens.
        figures: the trainer's measurements of every step and evaluation.
        policies: published weights.
        services: inference servers.
        samplers: sampler processes.
        forks: continuations from a turn of a Record.
    """

    def __init__(self, database: RunDatabase) -> None:
        """Compose the repositories of an open database; callers use `connect` or `from_client`."""
        self.database = self._db = database
        self.clock = database.clock
        self._blobs = blobs = BlobRepository(database)
        self.images = ImageRepository(database, blobs)
        self.snapshots = SnapshotRepository(database, blobs)
        self.tasks = TaskRepository(database, self.images)
        self.groups = GroupRepository(database)
        self.turns = TurnRepository(database, blobs)
        fenced = FencedRecords(database, self.groups)
        self.records = RecordRepository(database, self.tasks, self.groups, fenced)
        self.scores = ScoreRepository(database, self.tasks, fenced)
        self.runs = RunRepository(database)
        self.trainer_leases = TrainerLeaseRepository(database)
        self.ledger = LedgerRepository(database, self.turns, self.trainer_leases)
        self.teaching = TeachingRepository(database, self.turns)
        self.figures = FigureRepository(database)
        self.policies = PolicyRepository(database)
        self.services = ServiceRepository(database)
        self.samplers = SamplerRepository(database)
        self.forks = ForkRepository(database)
        self.audit = AuditRepository(database)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        uri: str,
        database: str | None = None,
        *,
        server_selection_timeout: float = SELECTION_SECONDS,
        outage_seconds: float = OUTAGE_SECONDS,
    ) -> AsyncIterator[Self]:
        """Connect, check that the server responds, and close on exit.

        Args:
            uri: MongoDB connection string. Its write concern is ignored: writes are always
                majority-acknowledged and journaled.
            database: name of the database; by default the one in the URI.
            server_selection_timeout: seconds to wait for a server that accepts writes.
            outage_seconds: how long operations that may be repeated are retried once connected.

        Raises:
            ConfigError: the URI is malformed, or names no database.
            StoreError: no server responds, it refuses the login, or a release of another schema
                wrote the database.
        """
        async with connected(
            uri, database, server_selection_timeout, outage_seconds
        ) as run_database:
            store = cls(run_database)
            await store.runs.check_schema()
            yield store

    @classmethod
    def from_client(cls, client: Any, database: str | None = None) -> Self:
        """Use a client that the caller created and will close.

        Args:
            client: PyMongo's `AsyncMongoClient` or Motor's `AsyncIOMotorClient`. Its write concern
                is ignored: writes are always majority-acknowledged and journaled.
            database: name of the database; by default the one in the client's URI.

        Raises:
            ConfigError: no database is named.
        """
        return cls(given_database(client, database))

    @property
    def database_name(self) -> str:
        """Name of the run's database."""
        return self._db.name

    @property
    def redacted_uri(self) -> str:
        """The connection string to show: with the database, without the password."""
        return self._db.redacted_uri

    @operation("prepare the database")
    async def ensure_schema(self) -> None:
        """Create or update the validators, indexes and views.

        Raises:
            StoreError: a release of another schema wrote the database.
        """
        await self.runs.check_schema()
        await ensure_validators(self._db)
        for collection, indexes in INDEXES.items():
            await self._db[collection].create_indexes(indexes)
        await self._db["record_data"].create_indexes(ledger_indexes(DEFAULT_CONSUMER))
        await ensure_views(self._db)

    # What samplers never use is imported when it is asked for.

    @functools.cached_property
    def lineage(self) -> "LineageRepository":
        """From a step to its tool calls, and from a record to its steps."""
        from agentrl.store.views.lineage import LineageRepository  # noqa: PLC0415

        return LineageRepository(self._db, self.turns, self.policies)

    @functools.cached_property
    def reports(self) -> "ReportRepository":
        """Counts and details for display."""
        from agentrl.store.views.reports import ReportRepository  # noqa: PLC0415

        return ReportRepository(
            self._db,
            turns=self.turns,
            ledger=self.ledger,
            lineage=self.lineage,
            services=self.services,
            samplers=self.samplers,
        )

    @functools.cached_property
    def browse(self) -> "BrowseRepository":
        """Pages of groups and full-text search, for readers."""
        from agentrl.store.views.browsing import BrowseRepository  # noqa: PLC0415

        return BrowseRepository(self._db)

    @functools.cached_property
    def behavior(self) -> "BehaviorRepository":
        """Samples of what rollouts did, for readers."""
        from agentrl.store.views.behavior import BehaviorRepository  # noqa: PLC0415

        return BehaviorRepository(self._db)

    @functools.cached_property
    def maintenance(self) -> "MaintenanceRepository":
        """Sizes, and reclaiming disk space."""
        from agentrl.store.repositories.maintenance import MaintenanceRepository  # noqa: PLC0415

        return MaintenanceRepository(self._db, UnusedBlobs(self._db))

    @functools.cached_property
    def retention(self) -> "RetentionRepository":
        """Removal of old turns while the run goes on."""
        from agentrl.store.repositories.retention import RetentionRepository  # noqa: PLC0415

        return RetentionRepository(self._db, UnusedBlobs(self._db))

    @functools.cached_property
    def transfer(self) -> "TransferRepository":
        """Export to files and import."""
        from agentrl.store.repositories.transfer import TransferRepository  # noqa: PLC0415

        stores = (self, self.forked)

        async def prepare() -> None:
            for store in stores:
                await store.ensure_schema()

        return TransferRepository(self._db, prepare=prepare)

    @functools.cached_property
    def forked(self) -> "TrajectoryStore":
        """The rollouts of forks: Tasks, Records and turns in separate collections.

        Images and other large values, servers and policies are the run's.
        """
        return TrajectoryStore(self._db.of_forks())

    def holding(self, own_id: str) -> "TrajectoryStore":
        """Return the store that holds a Record, or a turn of one: this, or that of the forks."""
        return self.forked if is_of_fork(own_id) else self

    @operation("drop the database")
    async def drop_database(self) -> None:
        """Delete the run's whole database. AgentRL calls this only on an explicit request."""
        await self._db.client.drop_database(self.database_name)
