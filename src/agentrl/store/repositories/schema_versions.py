"""Which schema versions a release reads, works beside, and migrates.

Processes of two releases meet in one run while it is upgraded. Whether they may is decided by the
run document alone: its `schema_version`, and `readable_since`, the oldest version whose processes
may work on its documents.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.errors import StoreError
from agentrl.schema import SCHEMA_VERSION
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import shown
from agentrl.store.repositories.liveness import live_processes
from agentrl.store.repositories.runs import DEFAULT_CONSUMER, TrainerLeaseRepository


@dataclass(frozen=True)
class Migration:
    """How the documents of one schema version become those of the next."""

    change: Callable[[RunDatabase], Awaitable[None]]
    """Changes the documents. A trainer that ends meanwhile leaves it to the next, which repeats it."""
    readable_since: int
    """Oldest schema version whose processes may work on documents of the next version."""


MIGRATIONS: dict[int, Migration] = {}
"""Schema version -> its migration to the next."""


class SchemaRepository(Repository):
    """The schema version of the run's documents."""

    def __init__(self, database: RunDatabase, trainer_leases: TrainerLeaseRepository) -> None:
        super().__init__(database)
        self._trainer_leases = trainer_leases

    @operation("read the schema version")
    async def check_readable(self) -> None:
        """Check that this release can read the run.

        Raises:
            StoreError: a later release wrote it, and earlier ones cannot read that.
        """
        run = await self._run()
        if run is not None and _readable_since(run) > SCHEMA_VERSION:
            raise self._mismatch(run)

    @operation("read the schema version")
    async def check_joinable(self) -> bool:
        """Check that this release may work on the run, and return whether the schema is its own.

        A database without a run gets this release's schema.

        Raises:
            StoreError: its documents and this release's cannot be mixed.
        """
        run = await self._run()
        if run is None:
            return True
        version = run["schema_version"]
        if version < SCHEMA_VERSION:
            path = _path(version)
            if path is None or any(step.readable_since > version for step in path):
                raise self._mismatch(run)
        elif _readable_since(run) > SCHEMA_VERSION:
            raise self._mismatch(run)
        return bool(version == SCHEMA_VERSION)

    @operation("read the schema version")
    async def is_migratable(self) -> bool:
        """Return whether the run has an earlier schema that `migrate` replaces."""
        run = await self._run()
        return run is not None and bool(_path(run["schema_version"]))

    @operation("migrate the run")
    async def migrate(self) -> None:
        """Give the run this release's schema. The caller holds the lease of the main trainer.

        Raises:
            StoreError: processes of the earlier schema are at work that could not go on.
            LeaseLost: another trainer took the run over.
        """
        run = await self._run()
        version = SCHEMA_VERSION if run is None else run["schema_version"]
        for migration in _path(version) or []:
            if migration.readable_since <= version:
                readable_since = max(migration.readable_since, _readable_since(run or {}))
            else:
                await self._check_idle()
                readable_since = migration.readable_since
            await self._trainer_leases.check(DEFAULT_CONSUMER)
            await migration.change(self._db)
            version += 1
            await self._trainer_leases.set_schema(version, readable_since)

    async def _check_idle(self) -> None:
        at_work = [
            str(one)
            for one in await live_processes(self._db)
            if one.kind != "trainer" or one.consumer != DEFAULT_CONSUMER
        ]
        if at_work:
            raise StoreError(
                f"run {self._db.name!r} cannot be migrated to schema version {SCHEMA_VERSION} while "
                f"processes of an earlier release work on it: {'; '.join(at_work)}; stop them, and "
                "start this command again"
            )

    async def _run(self) -> Document | None:
        names = shown("schema_version", "readable_since", "trainer_leases")
        found: Document | None = await self._db.runs.find_one({}, names)
        return found

    def _mismatch(self, run: Document) -> StoreError:
        version = run["schema_version"]
        is_later = version > SCHEMA_VERSION
        release = "a later release" if is_later else "an earlier release"
        if name := run.get("trainer_leases", {}).get(DEFAULT_CONSUMER, {}).get("release"):
            release = f"AgentRL {name}, {release}"
        way_out = "use that release, or another --run_name"
        if not is_later and _path(version) is not None:
            way_out = "start its trainer with this release first, which migrates it"
        return StoreError(
            f"database {self._db.name!r} has schema version {version}, and this AgentRL uses "
            f"{SCHEMA_VERSION}: it was written by {release}; {way_out}"
        )


def _path(version: int) -> list[Migration] | None:
    """Return the migrations from a version to this release's; None if one is missing."""
    steps = range(version, SCHEMA_VERSION)
    return (
        [MIGRATIONS[step] for step in steps] if all(step in MIGRATIONS for step in steps) else None
    )


def _readable_since(run: Document) -> int:
    since = run.get("readable_since")
    return int(run.get("schema_version", SCHEMA_VERSION) if since is None else since)
