"""What people ask of a run: its story record by record, what failed, who is alive."""

from datetime import datetime
from typing import Any

from agentrl.errors import StoreError
from agentrl.schema import (
    DispatchedSamplingTask,
    InferenceService,
    Record,
    RecordStatus,
    RunStatus,
    SamplerInfo,
    Task,
)
from agentrl.schema.base import Value
from agentrl.store.codec import from_document, task_from_document
from agentrl.store.door import operation
from agentrl.store.lineage import LineageDoor, RecordLineage
from agentrl.store.progress import Progress, ProgressDoor

FAILED: dict[str, Any] = {
    "$or": [
        {"status": "failed"},
        {"error": {"$ne": None}},
        {"attempts.ended_by": {"$in": ["expired", "error"]}},
    ]
}
"""Records with which something went wrong in the infrastructure."""


class RunSummary(Value):
    """One run at a glance."""

    name: str
    status: RunStatus
    policy_version: int
    num_groups: int
    num_groups_completed: int
    num_output_tokens: int
    mean_score: float | None
    """Over scored training records."""
    created_at: datetime
    updated_at: datetime


class Liveness(Value):
    """Who takes part in a run; times are the database server's."""

    now: datetime
    services: list[InferenceService]
    samplers: list[SamplerInfo]


class RunView(Value):
    """How far the run is, and who works on it."""

    summary: RunSummary
    progress: Progress
    processes: Liveness


class RecordStory(Value):
    """One record with everything that belongs to it."""

    record: Record
    task: Task
    attempt: int
    """The attempt whose turns are shown."""
    turns: tuple[DispatchedSamplingTask, ...]
    policy_version: int
    """The run's current version: staleness of what was not trained is counted from it."""
    lineage: RecordLineage


class Failure(Value):
    """One record with which something went wrong."""

    record_id: str
    status: RecordStatus
    num_attempts: int
    num_failed_attempts: int
    error: str | None
    last_error: str | None
    """Of the last attempt that ended badly."""
    owner: str | None = None
    """Who held that attempt."""


class InspectionDoor(LineageDoor, ProgressDoor):
    """Reads for people. Nothing here writes."""

    @operation("read the run's summary")
    async def summary(self) -> RunSummary:
        """Return the run at a glance.

        Raises:
            StoreError: there is no run.
        """
        run = await self._runs.find_one({}, {"config": 0})
        if run is None:
            raise StoreError(f"database {self.database_name!r} holds no run")
        scores = await self._records.aggregate(
            [
                {"$match": {"status": "scored", "order": {"$gte": 0}}},
                {"$group": {"_id": None, "mean": {"$avg": "$score.value"}}},
            ]
        )
        tokens = await self._samplers.aggregate(
            [{"$group": {"_id": None, "sum": {"$sum": "$num_output_tokens"}}}]
        )
        mean = next(iter(await scores.to_list()), {"mean": None})["mean"]
        train = {"split": "train"}
        return RunSummary(
            name=run["_id"],
            status=run["status"],
            policy_version=run["policy_version"],
            num_groups=await self._tasks.count_documents(train),
            num_groups_completed=await self._tasks.count_documents(
                {**train, "status": "completed"}
            ),
            num_output_tokens=next(iter(await tokens.to_list()), {"sum": 0})["sum"],
            mean_score=mean,
            created_at=run["created_at"],
            updated_at=run["updated_at"],
        )

    @operation("read who takes part")
    async def processes(self) -> Liveness:
        """Return all servers and samplers that ever registered, and the server's clock."""
        hello = await self._db.command("hello", codec_options=self._db.codec_options)
        return Liveness(
            now=hello["localTime"],
            services=[
                from_document(InferenceService, document)
                async for document in self._services.find().sort("_id", 1)
            ],
            samplers=[
                from_document(SamplerInfo, document)
                async for document in self._samplers.find().sort("started_at", 1)
            ],
        )

    @operation("list runs")
    async def run_names(self) -> list[str]:
        """Return the runs that this server holds and this login may see, by name."""
        found = []
        for name in sorted(await self._client.list_database_names()):
            if name not in ("admin", "config", "local"):
                run = await self._client[name]["runs"].find_one({}, {"schema_version": 1})
                if run is not None and run["_id"] == name and "schema_version" in run:
                    found.append(name)
        return found

    async def view(self, consumer: str) -> RunView:
        """Return how far the run is, for the trainer `consumer`."""
        return RunView(
            summary=await self.summary(),
            progress=await self.progress(consumer),
            processes=await self.processes(),
        )

    @operation("read a record's story")
    async def story(self, record_id: str, attempt: int | None = None) -> RecordStory:
        """Return a record with its question, turns and lineage.

        Args:
            record_id: `{task id}/{traj_id}`.
            attempt: whose turns to read; the last one's when not given.

        Raises:
            StoreError: there is no such record or attempt.
        """
        document = await self._records.find_one({"_id": record_id})
        if document is None:
            raise StoreError(await self._no_such_record(record_id))
        record = from_document(Record, document)
        shown = record.attempt if attempt is None else attempt
        if attempt is not None and attempt not in {one.attempt for one in record.attempts}:
            raise StoreError(f"record {record_id!r} had {record.attempt} attempt(s), no {attempt}")
        task = await self._tasks.find_one({"_id": record.task_id})
        run = await self._runs.find_one({}, {"policy_version": 1})
        if task is None:
            raise StoreError(f"task {record.task_id!r} of record {record_id!r} does not exist")
        turns = (
            await self.read_turns(record.turns)
            if shown == record.attempt
            else await self.turns_of(record_id, shown)
        )
        return RecordStory(
            record=record,
            task=task_from_document(task),
            attempt=shown,
            turns=tuple(turns),
            policy_version=run["policy_version"] if run else 0,
            lineage=await self.record_lineage(record_id),
        )

    async def _no_such_record(self, record_id: str) -> str:
        similar = await self._records.find_one({"task_id": record_id}, {"_id": 1})
        similar = similar or await self._records.find_one({}, {"_id": 1}, sort=[("_id", 1)])
        hint = f"; ids look like {similar['_id']!r}" if similar else "; there are none yet"
        return f"record {record_id!r} does not exist in {self.database_name!r}{hint}"

    @operation("read failures")
    async def failures(self, limit: int = 100) -> list[Failure]:
        """Return records with which something went wrong, the latest first."""
        found = self._records.find(FAILED).sort([("started_at", -1), ("_id", 1)]).limit(limit)
        failures = []
        async for document in found:
            record = from_document(Record, document)
            bad = [one for one in record.attempts if one.ended_by in ("expired", "error")]
            failures.append(
                Failure(
                    record_id=record.id,
                    status=record.status,
                    num_attempts=record.attempt,
                    num_failed_attempts=len(bad),
                    error=record.error,
                    last_error=bad[-1].error if bad else None,
                    owner=bad[-1].owner if bad else None,
                )
            )
        return failures
