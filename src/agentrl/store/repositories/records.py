"""Records as slots: claimed under a lease, renewed, finished, failed or released.

A claim is one atomic write. Every later write of the holder goes through `FencedRecords`.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from types import MappingProxyType

from pymongo import ReturnDocument

from agentrl.schema import BranchPoint, Outcome, Record, RecordStatus, Split, Task
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document, encode, from_document, without_none
from agentrl.store.documents.expressions import (
    NEXT_FENCE,
    after,
    attempt_failed,
    attempts_closed,
    held,
    lease,
    lease_lost,
    literal,
    waiting_lease,
)
from agentrl.store.repositories.fenced_records import FencedRecords
from agentrl.store.repositories.task_groups import GroupRepository, TaskRepository
from agentrl.store.writes import update_each

CLAIM_ORDER = [("order", 1), ("traj_id", 1)]
MAY_BE_RESUMED = {
    "$and": [
        {"$eq": ["$resumable", True]},
        {"$gt": [{"$size": "$turns"}, 0]},
        {"$in": [{"$last": "$attempts.ended_by"}, ["expired", "released"]]},
    ]
}
"""The attempt's holder died or released it, and its tools keep no state that could be lost. An
attempt that ended with an error is not resumed, because it would probably fail again at the same
point."""


class RecordRepository(Repository):
    """Claims and reads Records, renews their leases, and ends their attempts."""

    def __init__(
        self,
        database: RunDatabase,
        tasks: TaskRepository,
        groups: GroupRepository,
        fenced: FencedRecords,
    ) -> None:
        super().__init__(database)
        self._tasks = tasks
        self._groups = groups
        self._fenced = fenced

    @operation("read a record")
    async def get(self, record_id: str) -> Record | None:
        """Return the Record, or None if it does not exist."""
        document = await self._db.records.find_one({"_id": record_id})
        return None if document is None else from_document(Record, document)

    @operation("read a group")
    async def of_task(self, task_id: str) -> list[Record]:
        """Return the Records of a Task, in order of `traj_id`."""
        cursor = self._db.records.find({"task_id": task_id}).sort("traj_id", 1)
        return [from_document(Record, document) async for document in cursor]

    async def find(
        self, *, status: RecordStatus | None = None, split: Split | None = None
    ) -> AsyncIterator[Record]:
        """Yield the matching Records by order and `traj_id`."""
        async with self._db.boundary("read records"):
            cursor = self._db.records.find(without_none(status=status, split=split))
            async for document in cursor.sort([("order", 1), ("traj_id", 1)]):
                yield from_document(Record, document)

    @operation("claim a slot", repeatable=False)
    async def claim(
        self,
        owner: str,
        *,
        lease_seconds: float,
        admitted_groups: int,
        max_attempts: int,
        splits: Collection[Split] | None = None,
        resumable: bool = False,
        task_id: str | None = None,
    ) -> tuple[Record, Task] | None:
        """Claim the first claimable slot in one atomic write.

        If no slot is pending, slots with expired leases are taken back first.

        Args:
            owner: the claiming process.
            lease_seconds: how long the lease lasts without a heartbeat.
            admitted_groups: only slots with `order` below this are claimable (`Run`); evaluation
                slots have negative orders and always are.
            max_attempts: attempts after which an expired slot is failed instead.
            splits: claim only slots of these splits; None means any.
            resumable: the claimer's tools keep no state. The claim then resumes an attempt that
                another such claimer released or left behind when it died; otherwise every claim
                starts a new attempt.
            task_id: claim only slots of this Task.

        Returns:
            The Record under its new lease, and its Task; None if no slot is claimable. A Record
            with `turns` is an attempt to be resumed after them.
        """
        wanted = claim_filter(admitted_groups, splits)
        if task_id is not None:
            wanted["task_id"] = task_id
        update = claim_update(owner, lease_seconds, resumable=resumable)
        claimed = await self._claim_pending(wanted, update)
        # Expired leases are searched only if no slot is pending: a claim stays a single write while
        # there is work, and the slots of a dead sampler are taken back before a run becomes idle.
        if claimed is None and await self._groups.reap_expired(max_attempts, lease_seconds):
            claimed = await self._claim_pending(wanted, update)
        if claimed is None:
            return None
        record = from_document(Record, claimed)
        self._db.leases.note(record.id, record.fence, lease_seconds)
        return record, await self._tasks.of_claimed(record)

    async def _claim_pending(self, wanted: Document, update: list[Document]) -> Document | None:
        return await self._db.records.find_one_and_update(
            wanted, update, sort=CLAIM_ORDER, return_document=ReturnDocument.AFTER
        )

    @operation("renew leases")
    async def renew(self, leases: Sequence[tuple[str, int]], lease_seconds: float) -> set[str]:
        """Extend leases by (record id, fence), all in one request.

        Returns:
            The ids of the Records whose lease is lost; their holders must stop writing.
        """
        if not leases:
            return set()
        extend = [{"$set": {"lease.expires_at": after(lease_seconds)}}]
        extended = await update_each(
            self._db.records,
            [(held(record_id, fence), extend) for record_id, fence in leases],
        )
        if extended == len(leases):
            for record_id, fence in leases:
                self._db.leases.note(record_id, fence, lease_seconds)
            return set()
        ids = [record_id for record_id, _ in leases]
        found = self._db.records.find({"_id": {"$in": ids}}, {"fence": 1, "status": 1})
        # A Record that its holder has just finished or scored has no lease either, but no other
        # process took it over: its last claim is still the holder's.
        kept = {
            (d["_id"], d["fence"])
            async for d in found
            if d["status"] in ("running", "finished", "scored")
        }
        return {record_id for record_id, fence in leases if (record_id, fence) not in kept}

    @operation("finish a rollout")
    async def finish(
        self,
        record_id: str,
        fence: int,
        *,
        outcome: Outcome,
        final_answer: str | None,
        lease_seconds: float,
        reward: float | None = None,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Store the outcome of the rollout; the lease continues for scoring.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        update = {
            "outcome": literal(outcome),
            "final_answer": literal(encode(final_answer)),
            "reward": reward,
            "metrics": literal(encode(dict(metrics))),
            "finished_at": "$$NOW",
            "attempts": attempts_closed("finished", None),
            "lease.expires_at": after(lease_seconds),
            "error": None,
        }
        await self._fenced.move(record_id, fence, "finished", update)

    @operation("release a slot")
    async def release(self, record_id: str, fence: int) -> None:
        """Release a lease; the attempt does not count as failed.

        A running slot becomes claimable again; other processes may score a finished one.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        running = {"$eq": ["$status", "running"]}
        update = {
            "status": {"$cond": [running, "pending", "$status"]},
            "attempts": {"$cond": [running, attempts_closed("released", None), "$attempts"]},
            "lease": {"$cond": [running, None, waiting_lease(0)]},
        }
        self._db.leases.forget(record_id)
        await self._fenced.update(record_id, fence, {"$in": ["running", "finished"]}, update)

    @operation("choose a branch point")
    async def choose_branch(
        self, record_id: str, fence: int, point: BranchPoint | None, why_none: str = ""
    ) -> Record:
        """Store where the rollout leaves another one; later attempts keep it.

        Args:
            record_id: the Record, of a later round.
            fence: fencing token of the caller's lease.
            point: the branch point; None: it starts at the question.
            why_none: why there is none.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        stored = None if point is None else encode(point.model_dump())
        update = {"branch": literal(stored), "no_branch": literal(encode(why_none))}
        document = await self._db.records.find_one_and_update(
            {**held(record_id, fence), "status": "running"},
            [{"$set": update}],
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            raise lease_lost(record_id, fence)
        return from_document(Record, document)

    @operation("close a branch")
    async def close_branch(self, record_id: str, fence: int, reason: str) -> None:
        """Release a slot whose branch cannot be played: its next attempt starts at the question.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        update = {
            "branch": None,
            "no_branch": literal(encode(reason)),
            "resumable": False,
            "status": "pending",
            "attempts": attempts_closed("released", None),
            "lease": None,
        }
        self._db.leases.forget(record_id)
        await self._fenced.update(record_id, fence, "running", update)

    @operation("end a failed attempt")
    async def fail_attempt(
        self, record_id: str, fence: int, error: str, max_attempts: int
    ) -> Record:
        """End the attempt because of an infrastructure failure.

        The slot becomes claimable again. After `max_attempts` such failures it becomes `failed`
        permanently, and its group continues without it.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        self._db.leases.forget(record_id)
        document = await self._db.records.find_one_and_update(
            {**held(record_id, fence), "status": "running"},
            attempt_failed("error", error, max_attempts),
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            raise lease_lost(record_id, fence)
        record = from_document(Record, document)
        if record.status == "failed":
            await self._groups.complete({record.task_id})
        return record


def claim_filter(admitted_groups: int, splits: Collection[Split] | None) -> Document:
    """Return the filter of claimable slots."""
    wanted: Document = {"status": "pending", "order": {"$lt": admitted_groups}}
    if splits is not None:
        wanted["split"] = {"$in": sorted(splits)}
    return wanted


def claim_update(owner: str, lease_seconds: float, *, resumable: bool = False) -> list[Document]:
    """Return the update that starts a new attempt and clears the results of the last one.

    With `resumable`, it resumes the last attempt instead if that attempt can be resumed.
    """
    attempt = {
        "attempt": "$attempt",
        "fence": "$fence",
        "owner": literal(owner),
        "first_turn": {"$size": "$turns"},
        "started_at": "$$NOW",
        "ended_at": None,
        "ended_by": None,
        "error": None,
    }
    started: Document = {
        "status": "running",
        "fence": NEXT_FENCE,
        "resumable": resumable,
        "finished_at": None,
        "outcome": None,
        "final_answer": None,
        "reward": None,
        "metrics": literal({}),
        "error": None,
    }
    new_attempt: Document = {
        "attempt": {"$add": ["$attempt", 1]},
        "started_at": "$$NOW",
        "turns": [],
        "num_prompt_tokens": 0,
        "num_output_tokens": 0,
        "num_tool_calls": 0,
        "tool_names": [],
        "min_version": "$$REMOVE",
        "max_version": "$$REMOVE",
    }
    if resumable:
        new_attempt = {
            name: {"$cond": [MAY_BE_RESUMED, f"${name}", new]} for name, new in new_attempt.items()
        }
    return [
        {"$set": {**started, **new_attempt}},
        {
            "$set": {
                "lease": lease(owner, "$fence", lease_seconds),
                "attempts": {"$concatArrays": ["$attempts", [attempt]]},
            }
        },
    ]
