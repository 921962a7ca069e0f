"""Lineage both ways: a checkpoint's step to the tool calls behind it, and a record to its steps.

Policy of the step <-> records that the step trained <-> turns <-> tool calls
                              |- scorer and its version        |- TurnTraining of every step
                              '- version of the question
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from agentrl.errors import StoreError
from agentrl.schema import (
    DBRecordData,
    DispatchedSamplingTask,
    FinishReason,
    LedgerEntry,
    LedgerStatus,
    Outcome,
    Policy,
    Record,
    ToolCall,
    ToolResult,
    TurnTraining,
    VersionSpan,
)
from agentrl.schema.base import Value
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import (
    Document,
    from_document,
    record_data,
    require,
    task_version,
)
from agentrl.store.documents.expressions import shown
from agentrl.store.repositories.fleet import PolicyRepository
from agentrl.store.repositories.runs import DEFAULT_CONSUMER
from agentrl.store.repositories.turns import TurnRepository


class TurnLineage(Value):
    """One turn: its sampled output, its tool calls, and its use by optimizer steps."""

    id: str
    index: int
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    server: str
    tool_calls: tuple[ToolCall, ...]
    tool_results: tuple[ToolResult, ...]
    trainings: tuple[TurnTraining, ...]


class RecordLineage(Value):
    """One record: its origin and the steps that used it."""

    record_id: str
    task_id: str
    task_version: str
    """Version of the question when its group completed; empty before."""
    task_changed: bool
    """Whether the question was edited afterwards."""
    scorer: str | None
    scorer_version: str | None
    score: float | None
    ledger: dict[str, LedgerEntry]
    turns: tuple[TurnLineage, ...]


class StepLineage(Value):
    """One optimizer step: the resulting weights and the records behind them."""

    step: int
    consumer: str
    policy: Policy | None
    """The weights after the step; None if they are not yet or no longer published."""
    trained: tuple[RecordLineage, ...]
    """Records trained by the step, including those still reserved for it."""
    dropped: tuple[RecordLineage, ...]
    """Records that the step consumed without training."""


class StepRecord(Value):
    """One record and its use by a step."""

    record_id: str
    task_id: str
    traj_id: int
    status: LedgerStatus
    reason: str | None
    """Reason for dropping it."""
    score: float | None
    outcome: Outcome | None
    num_tokens: int
    min_version: int | None
    max_version: int | None
    advantage: float | None
    """Mean over its turns with an advantage."""
    ratio: float | None
    """Mean importance ratio over its turns' tokens in the model."""
    num_trained_tokens: int
    masked: dict[str, int]


class CreditedTurn(Value):
    """One trained turn and its credit."""

    turn_id: str
    record_id: str
    index: int
    step: int
    """Optimizer step that trained it."""
    credit: float
    """Its advantage in that step."""
    output_text: str
    tool_names: tuple[str, ...]
    """Tools that it called."""


class LineageRepository(Repository):
    """Reads lineage in both directions."""

    def __init__(
        self, database: RunDatabase, turns: TurnRepository, policies: PolicyRepository
    ) -> None:
        super().__init__(database)
        self._turns = turns
        self._policies = policies

    @operation("read the lineage of a step")
    async def of_step(self, step: int, consumer: str = DEFAULT_CONSUMER) -> StepLineage:
        """Return the records, turns and tool calls behind the weights of optimizer step `step`."""
        trained, dropped = await self._consumed(step, consumer)
        if not (trained or dropped):
            raise StoreError(
                f"the trainer {consumer!r} consumed no records at step {step} of {self._db.name!r}"
            )
        trainings = await self._trainings({"consumer": consumer, "step": step})
        lineages = await self._lineages([*trained, *dropped], trainings)
        return StepLineage(
            step=step,
            consumer=consumer,
            policy=await self._policies.of_step(step),
            trained=tuple(lineages[: len(trained)]),
            dropped=tuple(lineages[len(trained) :]),
        )

    @operation("read the records of a step")
    async def records_of_step(
        self, step: int, consumer: str = DEFAULT_CONSUMER
    ) -> list[StepRecord]:
        """Return the records that a step trained, reserved and dropped, without texts or tokens."""
        by_turn = await self._trainings({"consumer": consumer, "step": step})
        of_record: defaultdict[str, list[TurnTraining]] = defaultdict(list)
        for trainings in by_turn.values():
            of_record[trainings[0].record_id] += trainings
        trained, dropped = await self._consumed(step, consumer)
        by_id = {one.record_id: one for one in (*trained, *dropped)}
        return [
            _step_record(one, one.ledger[consumer], step, of_record[one.record_id])
            for one in by_id.values()
        ]

    @operation("read the lineage of a record")
    async def of_record(self, record_id: str) -> RecordLineage:
        """Return the question, scorer, turns and tool calls of a record, and all its steps."""
        document = require(
            await self._db.records.find_one({"_id": record_id}), f"record {record_id!r}"
        )
        data = await self._data({"_id": record_id})
        if not data:  # its group is not complete yet
            data = [record_data(from_document(Record, document), task_version="")]
        trainings = await self._trainings({"record_id": record_id})
        return (await self._lineages(data, trainings))[0]

    @operation("read the last training of a turn")
    async def last_training(self, turn: DispatchedSamplingTask) -> TurnTraining | None:
        """Return the training of a turn by the last step that used it, token by token."""
        document = await self._db.turn_training.find_one(
            {"record_id": turn.record_id, "turn_id": turn.id}, sort=[("step", -1)]
        )
        return None if document is None else from_document(TurnTraining, document)

    @operation("read the advantages of records")
    async def advantages(self, record_ids: Sequence[str]) -> dict[str, float]:
        """Return the mean advantage, by record, over the turns that an optimizer step used."""
        wanted: Document = {"record_id": {"$in": list(record_ids)}, "advantage": {"$ne": None}}
        mean = {"_id": "$record_id", "advantage": {"$avg": "$advantage"}}
        found = await self._db.turn_training.aggregate([{"$match": wanted}, {"$group": mean}])
        return {one["_id"]: one["advantage"] async for one in found}

    @operation("read the records of a group")
    async def records_of_group(self, task_id: str) -> list[DBRecordData]:
        """Return the ended records of a question, without their turns."""
        return await self._data({"task_id": task_id})

    @operation("read the credit of turns")
    async def credits(
        self, record_ids: Sequence[str], consumer: str = DEFAULT_CONSUMER
    ) -> dict[str, float]:
        """Return the advantage, by turn, in the last step of a trainer that computed it."""
        wanted: Document = {"record_id": {"$in": list(record_ids)}, "advantage": {"$ne": None}}
        found = self._db.turn_training.find(
            {**wanted, "consumer": consumer}, shown("turn_id", "advantage")
        ).sort("step", 1)
        return {one["turn_id"]: one["advantage"] async for one in found}

    @operation("find turns by their credit")
    async def lowest_credits(
        self, consumer: str = DEFAULT_CONSUMER, *, limit: int
    ) -> list[CreditedTurn]:
        """Return the trained turns with the lowest credit, that is where the policy lost most.

        A turn that several steps trained is returned for each of them.
        """
        wanted: Document = {"consumer": consumer, "num_trained_tokens": {"$gt": 0}}
        found = self._db.turn_training.find(wanted, {"tokens": 0}).sort("advantage", 1).limit(limit)
        trainings = [from_document(TurnTraining, document) async for document in found]
        ids = [training.turn_id for training in trainings]
        shown = {"index": 1, "output_text": 1, "tool_calls.name": 1}
        turns = {
            turn["_id"]: turn async for turn in self._db.turns.find({"_id": {"$in": ids}}, shown)
        }
        return [
            CreditedTurn(
                turn_id=training.turn_id,
                record_id=training.record_id,
                index=turn["index"],
                step=training.step,
                credit=training.advantage or 0.0,
                output_text=turn.get("output_text", ""),
                tool_names=tuple(call["name"] for call in turn.get("tool_calls", ())),
            )
            for training in trainings
            if (turn := turns.get(training.turn_id)) is not None
        ]

    @operation("find turns by their worth")
    async def worst_decisions(
        self, consumer: str = DEFAULT_CONSUMER, *, limit: int
    ) -> list[TurnTraining]:
        """Return the trained turns after which the worth fell most; the newest of equal ones first.

        A turn that several steps trained is returned for each of them.
        """
        wanted: Document = {
            "consumer": consumer,
            "worth.is_decision": True,
            "worth.change": {"$lt": 0},
        }
        found = self._db.turn_training.find(wanted, {"tokens": 0})
        newest = found.sort([("worth.change", 1), ("step", -1)]).limit(limit)
        return [from_document(TurnTraining, document) async for document in newest]

    async def _consumed(
        self, step: int, consumer: str
    ) -> tuple[list[DBRecordData], list[DBRecordData]]:
        """Return the records that a step trained, or reserved, and those that it dropped."""
        field = f"ledger.{consumer}"
        trained = await self._data({f"{field}.trained_at": step})
        reserved = await self._data({f"{field}.status": "reserved", f"{field}.step": step})
        dropped = await self._data({f"{field}.status": "dropped", f"{field}.step": step})
        return [*trained, *reserved], dropped

    async def _data(self, wanted: Document) -> list[DBRecordData]:
        found = self._db.record_data.find(wanted)
        data = [from_document(DBRecordData, document) async for document in found]
        return sorted(data, key=lambda one: (one.order, one.traj_id))

    async def _trainings(self, wanted: Document) -> dict[str, list[TurnTraining]]:
        by_turn: defaultdict[str, list[TurnTraining]] = defaultdict(list)
        found = self._db.turn_training.find(wanted, {"tokens": 0})
        async for document in found:
            training = from_document(TurnTraining, document)
            by_turn[training.turn_id].append(training)
        return by_turn

    async def _lineages(
        self, data: Sequence[DBRecordData], trainings: dict[str, list[TurnTraining]]
    ) -> list[RecordLineage]:
        tasks = {one.task_id for one in data}
        versions = {
            task["_id"]: task_version(task)
            async for task in self._db.tasks.find({"_id": {"$in": sorted(tasks)}})
        }
        turns = iter(
            await self._turns.get_many([turn_id for one in data for turn_id in one.stored_turn_ids])
        )
        return [
            RecordLineage(
                record_id=one.record_id,
                task_id=one.task_id,
                task_version=one.task_version,
                task_changed=one.task_version not in ("", versions.get(one.task_id, "")),
                scorer=one.score.scorer if one.score else None,
                scorer_version=one.score.version if one.score else None,
                score=one.score.value if one.score else None,
                ledger=one.ledger,
                turns=tuple(_turn_lineage(next(turns), trainings) for _ in one.stored_turn_ids),
            )
            for one in data
        ]


def _step_record(
    data: DBRecordData, entry: LedgerEntry, step: int, trainings: Sequence[TurnTraining]
) -> StepRecord:
    advantages = [one.advantage for one in trainings if one.advantage is not None]
    ratios = [(one.ratio.mean, one.num_tokens) for one in trainings if one.ratio is not None]
    num_in_model = sum(num for _, num in ratios)
    masked: Counter[str] = Counter()
    for one in trainings:
        masked.update(one.masked)
    return StepRecord(
        record_id=data.record_id,
        task_id=data.task_id,
        traj_id=data.traj_id,
        status="trained" if step in entry.trained_at else entry.status,
        reason=entry.reason,
        score=data.score.value if data.score else None,
        outcome=data.outcome,
        num_tokens=data.num_tokens,
        min_version=data.min_version,
        max_version=data.max_version,
        advantage=sum(advantages) / len(advantages) if advantages else None,
        ratio=sum(mean * num for mean, num in ratios) / num_in_model if num_in_model else None,
        num_trained_tokens=sum(one.num_trained_tokens for one in trainings),
        masked=dict(masked),
    )


def _turn_lineage(
    turn: DispatchedSamplingTask, trainings: dict[str, list[TurnTraining]]
) -> TurnLineage:
    return TurnLineage(
        id=turn.id,
        index=turn.index,
        finish_reason=turn.finish_reason,
        version_spans=turn.version_spans,
        server=turn.server,
        tool_calls=turn.tool_calls,
        tool_results=turn.tool_results,
        trainings=tuple(
            sorted(trainings.get(turn.id, ()), key=lambda one: (one.consumer, one.step))
        ),
    )
