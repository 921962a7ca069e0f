"""Space used by a run's database, and its reclamation, which runs only on request."""

from typing import Any

from pymongo.errors import OperationFailure

from agentrl.errors import StoreError
from agentrl.schema.base import Value
from agentrl.schema.image import stored_key
from agentrl.store.database import UNAUTHORIZED, Repository, operation
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import lookup, shown
from agentrl.store.documents.packed_turns import blob_keys
from agentrl.store.repositories.liveness import live_processes

DELETE_BATCH = 1000


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

        Do not start a process of the run during the call. These stay readable: every record with
        its last attempt, all attempts of failed or unfinished records, and the summary of every
        attempt.

        Returns:
            What was deleted.

        Raises:
            StoreError: a process still works on the run.
        """
        await self.check_idle()
        plan, turns, blobs = await self._find_unneeded()
        await self._delete("turns", turns)
        await self._delete("blobs", blobs)
        if turns or blobs:
            await self._release_space()
        return plan

    async def _find_unneeded(self) -> tuple[CompactPlan, list[str], list[str]]:
        """Return the unneeded data: counts, ids of turns and ids of blobs."""
        superseded, rejected, size = await self._unneeded_turns()
        turns = [*superseded, *rejected]
        blobs, blob_bytes = await self._unreferenced_blobs(set(turns))
        plan = CompactPlan(
            superseded_turns=len(superseded),
            unreferenced_turns=len(rejected),
            unreferenced_blobs=len(blobs),
            num_bytes=size + blob_bytes,
        )
        return plan, turns, blobs

    async def _unneeded_turns(self) -> tuple[list[str], list[str], int]:
        """Return the ids of superseded turns, those of rejected turns, and the bytes of both."""
        ended_before = {"$lt": ["$attempt", "$record.attempt"]}
        is_current = {"$eq": ["$attempt", "$record.attempt"]}
        acknowledged = {"$in": ["$_id", {"$ifNull": ["$record.turns", []]}]}
        pipeline: list[Document] = [
            {"$project": {**shown("record_id", "attempt"), "bytes": {"$bsonSize": "$$ROOT"}}},
            lookup(
                *("records", "record_id", "_id", "record"),
                {"$project": shown("status", "attempt", "turns")},
            ),
            {"$unwind": {"path": "$record", "preserveNullAndEmptyArrays": True}},
            {
                "$project": {
                    "bytes": 1,
                    "superseded": {"$and": [{"$eq": ["$record.status", "scored"]}, ended_before]},
                    "refused": {"$and": [is_current, {"$not": acknowledged}]},
                }
            },
            {"$match": {"$or": [{"superseded": True}, {"refused": True}]}},
        ]
        superseded: list[str] = []
        rejected: list[str] = []
        size = 0
        for found in await self._db.aggregate(self._db.turns, pipeline):
            (superseded if found["superseded"] else rejected).append(found["_id"])
            size += found["bytes"]
        return superseded, rejected, size

    async def _unreferenced_blobs(self, excluded: set[str]) -> tuple[list[str], int]:
        """Return ids and bytes of the blobs to which no turn, or only `excluded` turns, refer."""
        used: set[str] = set()
        async for turn in self._db.turns.find():
            if turn["_id"] not in excluded:
                used.update(blob_keys(turn))
        async for turn in self._db["forks.turns"].find():
            used.update(blob_keys(turn))
        async for task in self._db.tasks.find({"images": {"$gt": []}}, {"images": 1}):
            used.update(filter(None, map(stored_key, task["images"])))
        unused, size = [], 0
        sizes: list[Document] = [{"$project": {"bytes": {"$bsonSize": "$$ROOT"}}}]
        for found in await self._db.aggregate(self._db.blobs, sizes):
            key: Any = found["_id"]
            if key.partition("/")[0] not in used:  # parts are `{key}/{number}`
                unused.append(key)
                size += found["bytes"]
        return unused, size

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
