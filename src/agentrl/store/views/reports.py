"""Reports on a run for people: progress, record details, failures and live processes."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

from pydantic import Field

from agentrl.errors import StoreError
from agentrl.runtime.processes.process_identity import is_dead
from agentrl.schema import (
    DispatchedSamplingTask,
    InferenceService,
    Record,
    RecordStatus,
    Run,
    RunPhase,
    RunState,
    SamplerInfo,
    Split,
    Task,
)
from agentrl.schema.base import Value
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document, from_document, require, task_from_document
from agentrl.store.documents.expressions import FAILED_ENDS, HAS_FAILURE, lookup
from agentrl.store.repositories.fleet import SamplerRepository, ServiceRepository
from agentrl.store.repositories.ledger import LedgerRepository
from agentrl.store.repositories.liveness import (
    ALIVE_SECONDS,
    LiveProcess,
    live_processes,
    mixed_releases,
    state_of,
    workers,
)
from agentrl.store.repositories.runs import DEFAULT_CONSUMER
from agentrl.store.repositories.turns import TurnRepository
from agentrl.store.views.first_answers import FirstAnswers, read_first_answers
from agentrl.store.views.learning_signal import (
    LearningSignal,
    MissingScores,
    read_missing_scores,
    read_signal,
)
from agentrl.store.views.lineage import LineageRepository, RecordLineage
from agentrl.store.views.record_search import RecordFilter, find_records
from agentrl.store.views.run_counts import (
    SplitCounts,
    mean_score,
    read_record_counts,
    read_split_counts,
    read_training_groups,
)
from agentrl.store.views.sampling_progress import SamplingProgress, read_sampling_progress
from agentrl.store.views.untaught_records import UntaughtRecords, read_untaught


class RunSummary(Value):
    """One run at a glance."""

    name: str
    status: RunState
    phase: RunPhase | None
    """Its current or last phase."""
    policy_version: int
    num_groups: int
    num_groups_completed: int
    num_output_tokens: int
    mean_score: float | None
    """Mean over the last `MEAN_OF` scored training records."""
    created_at: datetime
    updated_at: datetime


class Liveness(Value):
    """The servers and samplers of a run; times are the database server's."""

    now: datetime
    services: list[InferenceService]
    samplers: list[SamplerInfo]
    mixed_releases: str = ""
    """A warning, if live processes have different releases."""


class RunProgress(Value):
    """Counts of a run. The sign of `order` distinguishes training from evaluation."""

    policy_version: int
    step: int = 0
    """Optimizer steps that made this version."""
    phase: RunPhase | None = None
    groups_per_step: int = 1
    admitted_groups: int
    records: dict[RecordStatus, int] = Field(default_factory=dict)
    """Training records by status; statuses without records are omitted."""
    eval_records: dict[RecordStatus, int] = Field(default_factory=dict)
    """Evaluation records by status."""
    num_groups: int = 0
    num_groups_completed: int = 0
    num_groups_ready: int = 0
    """Complete groups that no trainer has reserved, trained or dropped."""
    num_groups_consumed: int = 0
    num_samplers: int = 0
    """Number of samplers that have ever registered."""
    num_output_tokens: int = 0
    """Tokens sampled so far, according to the samplers' last reports."""
    tokens_per_second: float = 0.0
    """What the servers sample at the moment, by their last heartbeats."""
    server_problem: str = ""
    """Why no server is in service, if all of them are out of it."""
    untaught: tuple[UntaughtRecords, ...] = ()
    """What waits for each teacher of `--teachers`; teachers without such records are omitted."""


class EvaluationStanding(Value):
    """Progress of the evaluation of one policy version."""

    version: int
    num_tasks: int
    num_completed: int
    mean_score: float | None
    """Mean over the rollouts scored so far, for display; the evaluation computes its own figure."""


class RunOverview(Value):
    """Progress of the run, and its processes."""

    summary: RunSummary
    progress: RunProgress
    processes: Liveness


class RecordDetail(Value):
    """One record with its question, turns and lineage."""

    record: Record
    task: Task
    attempt: int
    """The attempt whose turns are shown."""
    turns: tuple[DispatchedSamplingTask, ...]
    policy_version: int
    """The run's current version, from which the staleness of untrained turns is computed."""
    lineage: RecordLineage


class Failure(Value):
    """One record with a failed attempt, or one that failed permanently."""

    record_id: str
    status: RecordStatus
    num_attempts: int
    num_failed_attempts: int
    error: str | None
    last_error: str | None
    """Error of the last failed attempt."""
    owner: str | None = None
    """Process that held that attempt."""


# Tags are `eval@VERSION`, with a suffix `.NUMBER` if lost weights had the same version before.
_GONE_SECONDS = 3 * ALIVE_SECONDS
_EVALUATIONS: Document = {"tag": {"$gte": "eval@", "$lt": "eval@~"}}


def _tag_numbers(tag: str) -> tuple[int, ...]:
    return tuple(int(part) for part in tag.removeprefix("eval@").split("."))


def _problem_of(services: Sequence[InferenceService]) -> str:
    """Return the problem of one server if all are out of service; empty of those that were stopped."""
    if any(one.status != "down" or one.error == "stopped" for one in services):
        return ""
    return next((one.error for one in services if one.error), "")


def _is_gone(sampler: SamplerInfo, now: datetime) -> bool:
    """Return whether a sampler ended without saying so, as when the database was away."""
    return is_dead(sampler.id) or now - sampler.heartbeat_at > timedelta(seconds=_GONE_SECONDS)


class ReportRepository(Repository):
    """Read-only queries for display."""

    def __init__(
        self,
        database: RunDatabase,
        *,
        turns: TurnRepository,
        ledger: LedgerRepository,
        lineage: LineageRepository,
        services: ServiceRepository,
        samplers: SamplerRepository,
    ) -> None:
        super().__init__(database)
        self._turns = turns
        self._ledger = ledger
        self._lineage = lineage
        self._services = services
        self._samplers = samplers

    @operation("read the run's summary")
    async def summary(self) -> RunSummary:
        """Return a summary of the run."""
        run = await self._run()
        num_groups, num_completed = await read_training_groups(self._db)
        _, num_output_tokens = await self._sampler_totals()
        return RunSummary(
            name=run["_id"],
            status=await state_of(self._db, run),
            phase=run.get("phase"),
            policy_version=run["policy_version"],
            num_groups=num_groups,
            num_groups_completed=num_completed,
            num_output_tokens=num_output_tokens,
            mean_score=await mean_score(self._db),
            created_at=run["created_at"],
            updated_at=run["updated_at"],
        )

    @operation("read the run's state")
    async def state(self) -> RunState:
        """Return the run's status, or `interrupted` if no process is left to continue it."""
        return await state_of(self._db, await self._run())

    @operation("read progress")
    async def progress(self, consumer: str = DEFAULT_CONSUMER) -> RunProgress:
        """Return the counts of the run."""
        of_run = asyncio.gather(
            *(self._run(), read_untaught(self._db, consumer)),
            *(self._sampler_totals(), self._services.all(alive_within=ALIVE_SECONDS)),
        )
        of_records = asyncio.gather(
            read_record_counts(self._db),
            read_training_groups(self._db),
            self._ledger.num_ready_groups(consumer),
            self._ledger.num_reserved_groups(consumer),
        )
        (
            (run, untaught, (num_samplers, num_output_tokens), services),
            ((training, evaluation), (num_groups, num_completed), num_ready, num_reserved),
        ) = await asyncio.gather(of_run, of_records)
        return RunProgress(
            policy_version=run["policy_version"],
            step=from_document(Run, run).step,
            phase=run.get("phase"),
            groups_per_step=run["control"]["groups_per_step"],
            admitted_groups=run["admitted_groups"],
            records=training,
            eval_records=evaluation,
            num_groups=num_groups,
            num_groups_completed=num_completed,
            num_groups_ready=num_ready,
            # Trainers consume whole groups, so a complete group that is neither ready nor reserved
            # is consumed.
            num_groups_consumed=max(0, num_completed - num_ready - num_reserved),
            num_samplers=num_samplers,
            num_output_tokens=num_output_tokens,
            tokens_per_second=sum(one.load.tokens_per_second for one in services if one.load),
            server_problem=_problem_of(services),
            untaught=untaught,
        )

    @operation("count by split")
    async def by_split(self) -> dict[Split, SplitCounts]:
        """Return the counts of every split that has tasks."""
        return await read_split_counts(self._db)

    @operation("count groups")
    async def num_groups(self, split: Split) -> int:
        """Return the number of groups of a split."""
        if split == "train":
            return (await read_training_groups(self._db))[0]
        return await self._db.tasks.count_documents({"split": split})

    async def _run(self) -> Document:
        run = await self._db.runs.find_one({}, {"config": 0})
        if run is None:
            raise self._db.no_run()
        return run

    async def _sampler_totals(self) -> tuple[int, int]:
        """Return the number of samplers that have ever registered, and of the tokens they sampled."""
        sums: Document = {"num": {"$sum": 1}, "tokens": {"$sum": "$num_output_tokens"}}
        found = await self._db.aggregate(self._db.samplers, [{"$group": {"_id": None, **sums}}])
        return (found[0]["num"], found[0]["tokens"]) if found else (0, 0)

    @operation("read the learning signal")
    async def signal(
        self, consumer: str = DEFAULT_CONSUMER, *, step: int | None = None
    ) -> LearningSignal:
        """Return the learning signal of the groups that a trainer consumed, or of one step."""
        return await read_signal(self._db, consumer, step=step)

    @operation("read the first answers")
    async def first_answers(self) -> FirstAnswers | None:
        """Return what the starting weights answered so far; None before the first score."""
        return await read_first_answers(self._db, self._turns)

    @operation("read how sampling goes")
    async def sampling(self, consumer: str = DEFAULT_CONSUMER) -> SamplingProgress:
        """Return how the sampling of the step goes that the trainer `consumer` waits for."""
        return await read_sampling_progress(self._db, consumer)

    @operation("read missing scores")
    async def missing_scores(self) -> MissingScores:
        """Return how many ended records have no score, and why."""
        return await read_missing_scores(self._db)

    @operation("read servers and samplers")
    async def processes(self) -> Liveness:
        """Return all servers and samplers that have ever registered, and the server's time."""
        now = await self._db.server_time()
        return Liveness(
            now=now,
            mixed_releases=mixed_releases(await workers(self._db, now)),
            services=await self._services.all(),
            samplers=[
                one.model_copy(update={"status": "stopped"}) if _is_gone(one, now) else one
                for one in sorted(await self._samplers.all(), key=lambda one: one.started_at)
            ],
        )

    @operation("look for live processes")
    async def live_processes(self) -> list[LiveProcess]:
        """Return the processes that work on the run now."""
        return await live_processes(self._db)

    @operation("list runs")
    async def run_names(self) -> list[str]:
        """Return the runs that this server holds and this login may see, by name."""
        found = []
        for name in sorted(await self._db.client.list_database_names()):
            if name not in ("admin", "config", "local"):
                run = await self._db.client[name]["runs"].find_one({}, {"schema_version": 1})
                if run is not None and run["_id"] == name and "schema_version" in run:
                    found.append(name)
        return found

    @operation("list databases without a run")
    async def names_without_run(self) -> list[str]:
        """Return the databases prepared for a run that has none, by name.

        An import that was killed leaves one; so do tasks that were added before the first start.
        """
        found = []
        for name in sorted(await self._db.client.list_database_names()):
            database = self._db.client[name]
            prepared = {"runs", "tasks", "record_data", "turn_training"}
            is_prepared = prepared <= set(await database.list_collection_names())
            if is_prepared and await database["runs"].find_one({}, {"_id": 1}) is None:
                found.append(name)
        return found

    @operation("read the evaluations")
    async def evaluations(self, limit: int = 2) -> list[EvaluationStanding]:
        """Return the evaluations of the last versions, the oldest first."""
        tags = await self._db.tasks.distinct("tag", _EVALUATIONS)
        newest = sorted(tags, key=_tag_numbers)[-limit:]
        return [await self._evaluation(tag) for tag in newest]

    async def _evaluation(self, tag: str) -> EvaluationStanding:
        values = "$tries.score.value"
        sums: Document = {
            "tasks": {"$sum": 1},
            "completed": {"$sum": {"$toInt": {"$eq": ["$status", "completed"]}}},
            "scored": {"$sum": {"$size": values}},
            "score": {"$sum": {"$sum": values}},
        }
        (found,) = await self._db.aggregate(
            self._db.tasks,
            [
                {"$match": {"tag": tag}},
                lookup("records", "_id", "task_id", "tries", {"$project": {"score.value": 1}}),
                {"$group": {"_id": None, **sums}},
            ],
        )
        return EvaluationStanding(
            version=_tag_numbers(tag)[0],
            num_tasks=found["tasks"],
            num_completed=found["completed"],
            mean_score=found["score"] / found["scored"] if found["scored"] else None,
        )

    async def overview(self, consumer: str) -> RunOverview:
        """Return the run's progress for the trainer `consumer`."""
        return RunOverview(
            summary=await self.summary(),
            progress=await self.progress(consumer),
            processes=await self.processes(),
        )

    @operation("read a record")
    async def record_detail(self, record_id: str, attempt: int | None = None) -> RecordDetail:
        """Return a record with its question, turns and lineage.

        Args:
            record_id: `{task id}/{traj_id}`.
            attempt: the attempt whose turns to read; the last one by default.
        """
        document = await self._db.records.find_one({"_id": record_id})
        if document is None:
            raise StoreError(await self._unknown_record_text(record_id))
        record = from_document(Record, document)
        shown_attempt = record.attempt if attempt is None else attempt
        if attempt is not None and attempt not in {one.attempt for one in record.attempts}:
            raise StoreError(f"record {record_id!r} has {record.attempt} attempt(s), not {attempt}")
        task = require(
            await self._db.tasks.find_one({"_id": record.task_id}),
            f"task {record.task_id!r} of record {record_id!r}",
        )
        run = await self._db.runs.find_one({}, {"policy_version": 1})
        return RecordDetail(
            record=record,
            task=task_from_document(task),
            attempt=shown_attempt,
            turns=tuple(await self._turns.of_record(record_id, shown_attempt)),
            policy_version=run["policy_version"] if run else 0,
            lineage=await self._lineage.of_record(record_id),
        )

    @operation("find records")
    async def find_records(
        self, wanted: RecordFilter, *, consumer: str = DEFAULT_CONSUMER, limit: int = 20
    ) -> list[Record]:
        """Return at most `limit` matching records, by score or from the latest questions."""
        return await find_records(self._db, wanted, consumer=consumer, limit=limit)

    @operation("find the records of a condition")
    async def matching(self, condition: Document, task_ids: Sequence[str]) -> list[str]:
        """Return the ids of all records of some tasks that match a `record_condition`."""
        of_tasks = {"task_id": {"$in": list(task_ids)}}
        found = self._db.records.find({"$and": [of_tasks, condition]}, {"_id": 1}).sort("_id", 1)
        return [one["_id"] async for one in found]

    @operation("find the records that a version sampled")
    async def sampled_near(
        self, condition: Document, version: int | None, *, limit: int
    ) -> list[Record]:
        """Return at most `limit` records with turns that match a `record_condition`.

        Those that a version sampled, or versions near it, come first; the latest without a version.
        """
        middle = {"$avg": ["$min_version", "$max_version"]}
        distance: Document = {"$abs": {"$subtract": [middle, version]}}
        pipeline: list[Document] = [
            {"$match": {"turns.0": {"$exists": True}, "expired_at": None, **condition}},
            {"$set": {"distance": {"$ifNull": [distance, float("inf")]}}},
            {"$sort": {"distance": 1, "order": -1, "traj_id": 1}},
            {"$limit": limit},
            {"$unset": "distance"},
        ]
        found = await self._db.aggregate(self._db.records, pipeline)
        return [from_document(Record, document) for document in found]

    async def _unknown_record_text(self, record_id: str) -> str:
        similar = await self._db.records.find_one({"task_id": record_id}, {"_id": 1})
        similar = similar or await self._db.records.find_one({}, {"_id": 1}, sort=[("_id", 1)])
        hint = f"; ids look like {similar['_id']!r}" if similar else "; there are no records yet"
        return f"record {record_id!r} does not exist in {self._db.name!r}{hint}"

    @operation("read failures")
    async def failures(self, limit: int = 100) -> list[Failure]:
        """Return records with failures, the latest first."""
        return await self._failures(HAS_FAILURE, limit)

    async def agent_errors(self, limit: int = 100) -> list[Failure]:
        """Return records that ended with an exception of the agent, the latest first."""
        return await self._failures({"outcome": "agent_error"}, limit)

    async def _failures(self, which: Document, limit: int) -> list[Failure]:
        latest_first = [("started_at", -1), ("_id", 1)]
        failures = []
        async for document in self._db.records.find(which).sort(latest_first).limit(limit):
            record = from_document(Record, document)
            detail = (
                record.score.detail if record.score and record.outcome == "agent_error" else None
            )
            failed = [one for one in record.attempts if one.ended_by in FAILED_ENDS]
            failures.append(
                Failure(
                    record_id=record.id,
                    status=record.status,
                    num_attempts=record.attempt,
                    num_failed_attempts=len(failed),
                    error=record.error or detail,
                    last_error=failed[-1].error if failed else None,
                    owner=failed[-1].owner if failed else None,
                )
            )
        return failures
