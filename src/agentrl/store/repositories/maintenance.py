"""Space used by a run's database, and its reclamation, which runs only on request."""

from pymongo.errors import OperationFailure

from agentrl.errors import StoreError
from agentrl.schema.base import Value
from agentrl.store.database import UNAUTHORIZED, Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import shown
from agentrl.store.repositories.liveness import live_processes
from agentrl.store.repositories.unused_blobs import GRACE, UnusedBlobs

DELETE_BATCH = 1000
MAX_BLOBS = 100_000
"""Most blobs that one call removes while the run goes on."""


class CollectionSize(Value):
    """One collection."""

    name: str
    num_documents: int
    data_bytes: int
    """Documents as BSON."""
    storage_bytes: int
    """On disk, compressed."""
    index_bytes: int


class StoreStats(Value):
    """Counts and sizes of a run's database."""

    database: str
    schema_version: int | None
    collections: tuple[CollectionSize, ...]
    num_tokens: int
    """Prompt and sampled tokens of all records, each counted once per record."""
    bytes_per_token: float | None
    """Data bytes of turns and blobs divided by `num_tokens`."""


class CompactPlan(Value):
    """The data that `compact` would delete."""

    superseded_turns: int
    """Turns of ended attempts of scored records that a later attempt replaced."""
    unreferenced_turns: int
    """Turns that were rejected because their holder had lost its lease."""
    unreferenced_blobs: int
    num_bytes: int
    """Their size as BSON."""


class MaintenanceRepository(Repository):
    """Measures the database, and deletes unneeded data."""

    def __init__(self, database: RunDatabase, blobs: UnusedBlobs) -> None:
        super().__init__(database)
        self._blobs = blobs

    @operation("measure the database")
    async def stats(self) -> StoreStats:
        """Return counts and sizes of all collections."""
        names = await self._db.handle.list_collection_names(filter={"type": "collection"})
        sizes = [await self._size(name) for name in sorted(names) if not name.startswith("system.")]
        added = {"$add": ["$num_prompt_tokens", "$num_output_tokens"]}
        tokens = await self._db.aggregate(
            self._db.records, [{"$group": {"_id": None, "num": {"$sum": added}}}]
        )
        num_tokens = tokens[0]["num"] if tokens else 0
        held = sum(size.data_bytes for size in sizes if size.name in ("turns", "blobs"))
        run = await self._db.runs.find_one({}, {"schema_version": 1})
        return StoreStats(
            database=self._db.name,
            schema_version=run["schema_version"] if run else None,
            collections=tuple(sizes),
            num_tokens=num_tokens,
            bytes_per_token=held / num_tokens if num_tokens else None,
        )

    async def _size(self, name: str) -> CollectionSize:
        (found,) = await self._db.aggregate(self._db[name], [{"$collStats": {"storageStats": {}}}])
        stats = found["storageStats"]
        return CollectionSize(
            name=name,
            num_documents=stats["count"],
            data_bytes=stats["size"],
            storage_bytes=stats["storageSize"],
            index_bytes=stats["totalIndexSize"],
        )

    @operation("look for live processes")
    async def check_idle(self) -> None:
        """Make sure that no process works on the run.

        Killed processes of this machine do not count.

        Raises:
            StoreError: a trainer holds a lease, a sampler or server reported recently, or a record
                is leased; the text names one such process and its start time.
        """
        forks = self._db.of_forks()
        for process in [*await live_processes(self._db), *await live_processes(forks)]:
            raise StoreError(
                f"run {self._db.name!r} is active: {process}; stop its processes first"
            )

    @operation("plan the compaction")
    async def plan_compaction(self) -> CompactPlan:
        """Return the plan of what `compact` would delete now."""
        plan, _, _ = await self._find_unneeded()
        return plan

    @operation("compact the database", repeatable=False)
    async def compact(self) -> CompactPlan:
        """Delete unneeded turns and blobs, and return the space to the disk.

        These stay readable: every record with its last attempt, all attempts of failed or
        unfinished records, and the summary of every attempt.

        Returns:
            What was deleted. While processes work on the run, blobs are only marked, and those that
            were marked an hour ago are deleted; at rest, all unused ones are.
        """
        plan, turns, blobs = await self._find_unneeded()
        await self._delete("turns", turns)
        num_blobs = plan.unreferenced_blobs
        if await self._is_active():
            await self._blobs.mark(blobs)
            num_blobs = await self._blobs.remove(GRACE, MAX_BLOBS)
        else:
            await self._blobs.remove_at_rest(blobs)
        if turns or num_blobs:
            await self._release_space()
        return plan.model_copy(update={"unreferenced_blobs": num_blobs})

    async def _is_active(self) -> bool:
        forks = self._db.of_forks()
        return bool(await live_processes(self._db) or await live_processes(forks))

    async def _find_unneeded(self) -> tuple[CompactPlan, list[str], list[str]]:
        """Return the unneeded data: counts, ids of turns and ids of blobs."""
        superseded, rejected, size = await self._unneeded_turns()
        turns = [*superseded, *rejected]
        unused: dict[str, int] = {}
        if await self._blobs.are_named():
            unused = await self._blobs.all_unreferenced(but_for=set(turns))
        plan = CompactPlan(
            superseded_turns=len(superseded),
            unreferenced_turns=len(rejected),
            unreferenced_blobs=len(unused),
            num_bytes=size + sum(unused.values()),
        )
        return plan, turns, [*unused]

    async def _unneeded_turns(self) -> tuple[list[str], list[str], int]:
        """Return the ids of superseded turns, those of rejected turns, and the bytes of both.

        Only records that were claimed more than once, or failed, can have any. Nothing claims an
        ended record again, so a run may go on meanwhile.
        """
        ended: Document = {"$or": [{"status": "scored", "fence": {"$gt": 1}}, {"status": "failed"}]}
        superseded: list[str] = []
        rejected: list[str] = []
        size = 0
        async for record in self._db.records.find(ended, shown("status", "attempt", "turns")):
            acknowledged = set(record["turns"])
            columns = {"attempt": 1, "bytes": {"$bsonSize": "$$ROOT"}}
            async for turn in self._db.turns.find({"record_id": record["_id"]}, columns):
                is_old = turn["attempt"] < record["attempt"]
                if is_old and record["status"] == "scored":
                    superseded.append(turn["_id"])
                elif not is_old and turn["_id"] not in acknowledged:
                    rejected.append(turn["_id"])
                else:
                    continue
                size += turn["bytes"]
        return superseded, rejected, size

    async def _delete(self, collection: str, ids: list[str]) -> None:
        for start in range(0, len(ids), DELETE_BATCH):
            await self._db[collection].delete_many(
                {"_id": {"$in": ids[start : start + DELETE_BATCH]}}
            )

    async def _release_space(self) -> None:
        for name in ("turns", "blobs"):
            try:
                # A primary, which a replica set's only member is, compacts with `force` only.
                await self._db.handle.command("compact", name, force=True)
            except OperationFailure as error:
                if error.code != UNAUTHORIZED:
                    raise
                return  # the login may delete but not compact; the server reuses the space later
