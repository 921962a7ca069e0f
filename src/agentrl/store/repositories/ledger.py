"""The training ledger: the records that a trainer reserved, trained and dropped, by step.

A DBRecordData without an entry under `ledger.<consumer>` is ready. Reading deletes nothing; after a
crash, `recover` restores the ledger exactly to its state at the last checkpoint.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

from pymongo import ReplaceOne

from agentrl.errors import StoreError
from agentrl.schema import DBRecordData, LedgerStatus, Split, TurnTraining
from agentrl.schema.ledger_origin import LEFT_OUT, Retrain
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document, encode, from_document, to_document
from agentrl.store.repositories.runs import DEFAULT_CONSUMER, TrainerLeaseRepository
from agentrl.store.repositories.turns import TurnRepository


class LedgerRepository(Repository):
    """Reads groups for training and records their ledger status."""

    def __init__(
        self, database: RunDatabase, turns: TurnRepository, leases: TrainerLeaseRepository
    ) -> None:
        super().__init__(database)
        self._turns = turns
        self._leases = leases

    @operation("read ready groups")
    async def ready_groups(
        self,
        consumer: str = DEFAULT_CONSUMER,
        *,
        split: Split = "train",
        limit: int,
        hydrate: bool = True,
        step: int = 0,
    ) -> list[list[DBRecordData]]:
        """Return complete groups that may be trained, in their order, each by `traj_id`.

        Args:
            consumer: name of the trainer.
            split: which split to read.
            limit: most groups to return.
            hydrate: fill in `turns` (one query per collection, regardless of the limit).
            step: the step that will train on the groups.

        Returns:
            Whole groups, including reserved and dropped members; each member's `ledger` has its
            status.
        """
        task_ids = await self._candidate_tasks(_ready(consumer), split, limit)
        # Groups of a lost step go to the step that is made again in its place.
        of_lost_step = {**_ready(consumer), f"ledger.{consumer}.step": step}
        again = await self._candidate_tasks(of_lost_step, split, limit) if step else {}
        task_ids |= again
        chosen = sorted(task_ids, key=lambda one: (one not in again, task_ids[one], one))[:limit]
        return await self._read_groups(chosen, hydrate)

    async def _candidate_tasks(
        self, condition: Document, split: Split, limit: int
    ) -> dict[str, int]:
        cursor = self._db.record_data.find(
            {"split": split, "group_completed": True, **condition}, {"task_id": 1, "order": 1}
        ).sort([("order", 1), ("traj_id", 1)])
        found: dict[str, int] = {}
        async for document in cursor:
            if len(found) == limit and document["task_id"] not in found:
                break
            found[document["task_id"]] = document["order"]
        await cursor.close()
        return found

    async def _read_groups(self, task_ids: list[str], hydrate: bool) -> list[list[DBRecordData]]:
        groups: dict[str, list[DBRecordData]] = {task_id: [] for task_id in task_ids}
        found = self._db.record_data.find({"task_id": {"$in": task_ids}}).sort("traj_id", 1)
        is_complete: dict[str, bool] = dict.fromkeys(task_ids, True)
        async for document in found:
            data = from_document(DBRecordData, document)
            groups[data.task_id].append(data)
            is_complete[data.task_id] &= data.group_completed
        # Records of a group are marked `group_completed` one by one. A group with unmarked records is
        # skipped, or the trainer would mistake a part for the whole group.
        complete = [groups[task_id] for task_id in task_ids if is_complete[task_id]]
        return await self._hydrate(complete) if hydrate else complete

    async def _hydrate(self, groups: list[list[DBRecordData]]) -> list[list[DBRecordData]]:
        ids = [turn_id for group in groups for data in group for turn_id in data.stored_turn_ids]
        turns = iter(await self._turns.get_many(ids))
        return [
            [
                data.model_copy(update={"turns": tuple(next(turns) for _ in data.stored_turn_ids)})
                for data in group
            ]
            for group in groups
        ]

    @operation("reserve records")
    async def reserve(self, consumer: str, record_ids: Sequence[str], step: int) -> None:
        """Reserve records for optimizer step `step` (from 1).

        Args:
            consumer: name of the trainer.
            record_ids: ready records.
            step: the step that will train on them.

        Raises:
            StoreError: a record is dropped, trained, or reserved for another step.
            LeaseLost: another trainer took over.
        """
        await self._leases.check(consumer)
        field = f"ledger.{consumer}"
        # Reserving again for the same step is allowed, because an operation is repeated if its reply
        # is lost.
        reservable = [
            {f"{field}.status": None},
            {f"{field}.status": "reserved", f"{field}.step": step},
        ]
        result = await self._db.record_data.update_many(
            {"_id": {"$in": list(record_ids)}, "$or": reservable},
            {"$set": {field: _entry("reserved", step)}},
        )
        if result.matched_count != len(set(record_ids)):
            refused = len(set(record_ids)) - result.matched_count
            raise StoreError(
                f"{refused} of {len(record_ids)} records cannot be reserved for step {step}"
            )

    @operation("drop records")
    async def drop(
        self, consumer: str, record_ids: Sequence[str], step: int, reasons: Mapping[str, str] | str
    ) -> None:
        """Drop records at step `step`: they are consumed without being trained.

        Args:
            consumer: name of the trainer.
            record_ids: ready records.
            step: the step that drops them; recovery to an earlier step makes them ready again.
            reasons: one reason for all, or one per record id.

        Raises:
            LeaseLost: another trainer took over.
        """
        await self._leases.check(consumer)
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for record_id in record_ids:
            by_reason[reasons if isinstance(reasons, str) else reasons[record_id]].append(record_id)
        field = f"ledger.{consumer}"
        for reason, ids in by_reason.items():
            await self._db.record_data.update_many(
                {"_id": {"$in": ids}, f"{field}.status": None},
                {"$set": {field: _entry("dropped", step, encode(reason))}},
            )

    @operation("commit the ledger")
    async def commit(self, consumer: str, up_to_step: int) -> int:
        """Mark records reserved for steps up to `up_to_step` as trained; call with the checkpoint.

        Returns:
            The number of records that became trained.

        Raises:
            LeaseLost: another trainer took over.
        """
        await self._leases.check(consumer)
        if consumer == DEFAULT_CONSUMER:
            await self._db.runs.update_one({}, {"$max": {"saved_step": up_to_step}})
        return await self._commit(consumer, up_to_step)

    async def _commit(self, consumer: str, up_to_step: int) -> int:
        field = f"ledger.{consumer}"
        trained_at = {"$concatArrays": [f"${field}.trained_at", [f"${field}.step"]]}
        result = await self._db.record_data.update_many(
            {f"{field}.status": "reserved", f"{field}.step": {"$lte": up_to_step}},
            [
                {"$set": {f"{field}.status": "trained", f"{field}.trained_at": trained_at}},
                {"$set": {f"{field}.trained_count": {"$size": f"${field}.trained_at"}}},
            ],
        )
        return result.modified_count

    @operation("recover the ledger")
    async def recover(self, consumer: str, checkpoint_step: int) -> None:
        """Restore the ledger to the checkpoint of `checkpoint_step` (0: none).

        Records reserved up to that step become trained, because the checkpoint contains their effect.
        Records reserved, trained or dropped later return to their status at the checkpoint, and keep
        the step, which reads them first when it is made again.

        Raises:
            LeaseLost: another trainer took over.
        """
        await self._leases.check(consumer)
        # Commit first: the checkpoint contains these steps, even if the trainer died before it could
        # commit them. Only later steps are reverted.
        await self._commit(consumer, checkpoint_step)
        field = f"ledger.{consumer}"
        later = {
            f"{field}.status": {"$in": ["dropped", "reserved", "trained"]},
            f"{field}.step": {"$gt": checkpoint_step},
        }
        kept = {
            "$filter": {
                "input": f"${field}.trained_at",
                "cond": {"$lte": ["$$this", checkpoint_step]},
            }
        }
        trained = {
            "status": "trained",
            "step": {"$max": f"${field}.trained_at"},
            "trained_at": f"${field}.trained_at",
            "trained_count": {"$size": f"${field}.trained_at"},
            "reason": None,
        }
        await self._db.turn_training.delete_many(
            {"consumer": consumer, "step": {"$gt": checkpoint_step}}
        )
        if consumer == DEFAULT_CONSUMER:
            # Later steps are made again.
            await self._db.runs.update_one({}, {"$min": {"expired_step": checkpoint_step}})
        was_trained = {"$gt": [{"$size": f"${field}.trained_at"}, 0]}
        await self._db.record_data.update_many(
            later,
            [
                {"$set": {f"{field}.trained_at": kept}},
                {"$set": {field: {"$cond": [was_trained, trained, {"step": f"${field}.step"}]}}},
            ],
        )

    async def find(
        self,
        consumer: str = DEFAULT_CONSUMER,
        *,
        status: LedgerStatus,
        step: int | None = None,
        hydrate: bool = False,
    ) -> AsyncIterator[DBRecordData]:
        """Yield the records with a ledger status, by step.

        Args:
            consumer: name of the trainer.
            status: status of the records.
            step: restrict to this optimizer step.
            hydrate: fill in `turns`.
        """
        wanted: Document = {f"ledger.{consumer}.status": status}
        if step is not None:
            wanted[f"ledger.{consumer}.step"] = step
        async with self._db.boundary("read record data"):
            cursor = self._db.record_data.find(wanted).sort(f"ledger.{consumer}.step", 1)
            async for document in cursor:
                data = from_document(DBRecordData, document)
                yield (await self._hydrate([[data]]))[0][0] if hydrate else data

    @operation("look for remaining groups")
    async def is_exhausted(self, consumer: str = DEFAULT_CONSUMER) -> bool:
        """Return whether every training group was reserved, trained or dropped."""
        # Open groups first: one that completes in between is then found by neither query, or both.
        if await self._db.tasks.find_one({"split": "train", "status": "created"}, {"_id": 1}):
            return False
        remaining = {
            "split": "train",
            "group_completed": {"$in": [False, True]},
            **_ready(consumer),
        }
        return await self._db.record_data.find_one(remaining, {"_id": 1}) is None

    @operation("count reserved groups")
    async def num_reserved_groups(self, consumer: str) -> int:
        """Return the number of training groups in steps that no checkpoint contains yet."""
        return await self._db.record_data.count_documents(
            {f"ledger.{consumer}.status": "reserved", "split": "train", "traj_id": 0}
        )

    @operation("count ready groups")
    async def num_ready_groups(self, consumer: str) -> int:
        """Return the number of complete training groups that were never reserved, trained or dropped."""
        return await self._db.record_data.count_documents(
            {"split": "train", "group_completed": True, **_ready(consumer), "traj_id": 0}
        )

    @operation("read the trained groups of a step")
    async def trained_groups(
        self, consumer: str, step: int
    ) -> tuple[list[TurnTraining], list[list[DBRecordData]]]:
        """Return the trainings of the turns in a step's batch, and the groups of these turns.

        Returns:
            The trainings in the order of the batch, and whole groups in the order in which the batch
            first mentions them.

        Raises:
            StoreError: they have expired.
        """
        await self._check_kept(consumer, step, step)
        wanted = {"consumer": consumer, "step": step, "position": {"$ne": None}}
        found = self._db.turn_training.find(wanted).sort("position", 1)
        trainings = [from_document(TurnTraining, document) async for document in found]
        task_ids = list(dict.fromkeys(training.task_id for training in trainings))
        return trainings, await self._read_groups(task_ids, hydrate=True)

    @operation("read groups")
    async def groups(self, task_ids: Sequence[str]) -> list[list[DBRecordData]]:
        """Return whole groups with their turns, in the order of the ids."""
        return await self._read_groups(list(task_ids), hydrate=True)

    @operation("read which groups the steps trained")
    async def tasks_by_step(self, consumer: str) -> dict[int, set[str]]:
        """Return step -> ids of the tasks that it trained on, for all committed steps in order."""
        trained_at = f"ledger.{consumer}.trained_at"
        pipeline: list[Document] = [
            {"$match": {trained_at: {"$gt": 0}}},
            {"$unwind": f"${trained_at}"},
            {"$group": {"_id": f"${trained_at}", "tasks": {"$addToSet": "$task_id"}}},
            {"$sort": {"_id": 1}},
        ]
        found = await self._db.aggregate(self._db.record_data, pipeline)
        committed = {f"ledger.{consumer}.status": "trained"}
        newest = await self._db.record_data.find_one(
            committed, {"ledger": 1}, sort=[(f"ledger.{consumer}.step", -1)]
        )
        last = 0 if newest is None else newest["ledger"][consumer]["step"]
        return {one["_id"]: set(one["tasks"]) for one in found if one["_id"] <= last}

    @operation("begin a ledger that repeats another")
    async def begin_repeating(
        self, consumer: str, origin: Retrain, left_out: Sequence[str]
    ) -> None:
        """Make a ledger what that of the origin was at its checkpoint, with some records dropped."""
        copied = [{"$set": {f"ledger.{consumer}": f"$ledger.{origin.consumer}"}}]
        of_origin = {f"ledger.{origin.consumer}": {"$exists": True}}
        await self._db.record_data.update_many(of_origin, copied)
        await self.recover(consumer, origin.checkpoint)
        await self.drop(consumer, left_out, origin.checkpoint, LEFT_OUT)

    @operation("read the trained tasks of steps")
    async def trained_tasks(self, consumer: str, first: int, last: int) -> list[str]:
        """Return the ids of the tasks that the steps `first` to `last` trained on.

        Raises:
            StoreError: some have expired.
        """
        await self._check_kept(consumer, first, last)
        wanted = {
            "consumer": consumer,
            "step": {"$gte": first, "$lte": last},
            "position": {"$ne": None},
        }
        return sorted(await self._db.turn_training.distinct("task_id", wanted))

    async def _check_kept(self, consumer: str, first: int, last: int) -> None:
        run = await self._db.runs.find_one({}, {"expired_step": 1})
        for step in range(first, min(last, (run or {}).get("expired_step", 0)) + 1):
            # A bundle holds those of steps that have expired in its run.
            of_step = {"consumer": consumer, "step": step}
            if await self._db.turn_training.find_one(of_step, {"_id": 1}) is None:
                raise StoreError(f"the turns of step {step} have expired (--retain_steps)")

    @operation("store the turn trainings of a step")
    async def put_turn_trainings(self, trainings: Sequence[TurnTraining]) -> None:
        """Store the trainings of one step with one bulk write; a repeated step replaces them."""
        if trainings:
            await self._db.turn_training.bulk_write(
                [
                    ReplaceOne({"_id": training.id}, to_document(training), upsert=True)
                    for training in trainings
                ],
                ordered=False,
            )


def _ready(consumer: str) -> Document:
    return {f"ledger.{consumer}.status": None}


def _entry(status: str, step: int, reason: str | None = None) -> Document:
    return {
        "status": status,
        "step": step,
        "trained_at": [],
        "trained_count": 0,
        "reason": reason,
    }
