"""Claiming slots, keeping them, and giving them back."""

import asyncio
from collections.abc import Collection, Sequence

from pymongo import AsyncMongoClient, ReturnDocument
from pymongo.asynchronous.database import AsyncDatabase

from agentrl.schema import Outcome, Record, Split, Task
from agentrl.store.codec import Document, encode, from_document, task_from_document
from agentrl.store.door import first, operation
from agentrl.store.expressions import (
    NEXT_FENCE,
    after,
    attempt_failed,
    attempts_closed,
    held,
    lease,
    lease_lost,
    literal,
    may_become,
    nobodys_lease,
)
from agentrl.store.transitions import Move, TransitionDoor
from agentrl.store.writes import update_each

CLAIM_ORDER = [("order", 1), ("traj_id", 1)]
KNOWN_TASKS, TASKS_AHEAD = 256, 32
MAY_BE_TAKEN_UP = {
    "$and": [
        {"$eq": ["$resumable", True]},
        {"$gt": [{"$size": "$turns"}, 0]},
        {"$in": [{"$last": "$attempts.ended_by"}, ["expired", "released"]]},
    ]
}
"""The attempt's holder died or handed back, and no state was lost with it. An attempt that ended
with an error is not: what failed once in the middle would fail there again."""


class SlotDoor(TransitionDoor):
    """The life of a Record while a sampler plays it."""

    def __init__(
        self, client: AsyncMongoClient[Document], database: AsyncDatabase[Document], uri: str
    ) -> None:
        super().__init__(client, database, uri)
        self._known_tasks: dict[str, Document] = {}
        self._reading_tasks = asyncio.Lock()

    @operation("claim a slot", repeatable=False)
    async def claim_record(
        self,
        owner: str,
        *,
        lease_seconds: float,
        admitted_groups: int,
        max_attempts: int,
        splits: Collection[Split] | None = None,
        resumable: bool = False,
    ) -> tuple[Record, Task] | None:
        """Claim the first claimable slot in one atomic write.

        When no slot is pending, slots whose lease expired are taken back first.

        Args:
            owner: the claiming process.
            lease_seconds: how long the lease lasts without a heartbeat.
            admitted_groups: only slots with `order` below this are claimable (`Run`); evaluation
                slots have negative orders and always are.
            max_attempts: attempts after which an expired slot is parked instead.
            splits: claim only slots of these splits; None means any.
            resumable: the claimer's tools keep no state. It then takes up an attempt of another such
                claimer that died or handed back; without it every claim begins a new attempt.

        Returns:
            The Record under its new lease, and its Task; None when there is nothing to claim. A
            Record with `turns` is an attempt to be taken up behind them.
        """
        wanted = claim_filter(admitted_groups, splits)
        update = claim_update(owner, lease_seconds, resumable=resumable)
        claimed = await self._claim_pending(wanted, update)
        if claimed is None and await self._reap_expired(max_attempts):
            claimed = await self._claim_pending(wanted, update)
        if claimed is None:
            return None
        record = from_document(Record, claimed)
        return record, await self._task_of(record)

    async def _task_of(self, record: Record) -> Task:
        """Return the Record's Task; the tries of a group share one reading of it."""
        if record.task_id not in self._known_tasks:
            # Claims in flight together miss the same Tasks: one reading serves them all.
            async with self._reading_tasks:
                if record.task_id not in self._known_tasks:
                    await self._read_tasks(record)
        return task_from_document(self._known_tasks[record.task_id])

    async def _read_tasks(self, record: Record) -> None:
        """Read the Record's Task, in training with those that are to be claimed after it.

        Where several processes play a group, each meets a new Task at every claim: reading one at a
        time would add half again to the cost of claiming.
        """
        if record.split == "train":
            following = {"split": record.split, "order": {"$gte": record.order}}
            found = self._tasks.find(following).sort("order", 1).limit(TASKS_AHEAD)
            self._known_tasks.update({task["_id"]: task async for task in found})
        if record.task_id not in self._known_tasks:
            document = await self._tasks.find_one({"_id": record.task_id})
            self._known_tasks[record.task_id] = first(document, f"task {record.task_id!r}")
        while len(self._known_tasks) > KNOWN_TASKS:
            self._known_tasks.pop(next(iter(self._known_tasks)))

    async def _claim_pending(self, wanted: Document, update: list[Document]) -> Document | None:
        return await self._records.find_one_and_update(
            wanted, update, sort=CLAIM_ORDER, return_document=ReturnDocument.AFTER
        )

    @operation("send heartbeats")
    async def heartbeat(self, leases: Sequence[tuple[str, int]], lease_seconds: float) -> set[str]:
        """Extend leases by (record id, fence), all in one request.

        Returns:
            The ids of those Records whose lease is lost; their holders must stop writing.
        """
        if not leases:
            return set()
        extend = [{"$set": {"lease.expires_at": after(lease_seconds)}}]
        extended = await update_each(
            self._records, [(held(record_id, fence), extend) for record_id, fence in leases]
        )
        if extended == len(leases):
            return set()
        ids = [record_id for record_id, _ in leases]
        found = self._records.find({"_id": {"$in": ids}}, {"fence": 1, "status": 1})
        # A Record that its holder finished or scored in this very moment has no lease either, but
        # nobody took it away: its last claim is still the holder's.
        kept = {
            (d["_id"], d["fence"])
            async for d in found
            if d["status"] in ("running", "finished", "scored")
        }
        return {record_id for record_id, fence in leases if (record_id, fence) not in kept}

    @operation("finish a rollout")
    async def finish_rollout(
        self,
        record_id: str,
        fence: int,
        *,
        outcome: Outcome,
        final_answer: str | None,
        lease_seconds: float,
    ) -> None:
        """Store how the rollout ended; the lease goes on, for scoring.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        update = {
            "outcome": literal(outcome),
            "final_answer": literal(encode(final_answer)),
            "finished_at": "$$NOW",
            "attempts": attempts_closed("finished", None),
            "lease.expires_at": after(lease_seconds),
            "error": None,
        }
        await self._moves.submit(
            Move(record_id=record_id, fence=fence, to="finished", update=update)
        )

    @operation("hand a slot back")
    async def release(self, record_id: str, fence: int) -> None:
        """Give up a lease in good order; the attempt is not counted as a failed one.

        A running slot becomes claimable again, a finished one becomes free to be scored by others.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        running = {"$eq": ["$status", "running"]}
        update = {
            "status": {"$cond": [running, "pending", "$status"]},
            "attempts": {"$cond": [running, attempts_closed("released", None), "$attempts"]},
            "lease": {"$cond": [running, None, nobodys_lease(0)]},
        }
        result = await self._records.update_one(
            {**held(record_id, fence), "status": {"$in": ["running", "finished"]}},
            [{"$set": update}],
        )
        if result.matched_count == 0:
            raise lease_lost(record_id, fence)

    @operation("end a failed attempt")
    async def fail_attempt(
        self, record_id: str, fence: int, error: str, max_attempts: int
    ) -> Record:
        """End the attempt for a reason of infrastructure.

        The slot becomes claimable again, or is parked as failed after `max_attempts` such ends; its
        group then goes on without it.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        document = await self._records.find_one_and_update(
            {**held(record_id, fence), "status": may_become("failed")},
            attempt_failed("error", error, max_attempts),
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            raise lease_lost(record_id, fence)
        record = from_document(Record, document)
        if record.status == "failed":
            await self.complete_group(record.task_id)
        return record


def claim_filter(admitted_groups: int, splits: Collection[Split] | None) -> Document:
    """Return the filter of claimable slots."""
    wanted: Document = {"status": "pending", "order": {"$lt": admitted_groups}}
    if splits is not None:
        wanted["split"] = {"$in": sorted(splits)}
    return wanted


def claim_update(owner: str, lease_seconds: float, *, resumable: bool = False) -> list[Document]:
    """Return the update that begins a new attempt and forgets the results of the last.

    With `resumable` it takes the last attempt up instead, where that may be done.
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
    begun: Document = {
        "status": "running",
        "fence": NEXT_FENCE,
        "resumable": resumable,
        "finished_at": None,
        "outcome": None,
        "final_answer": None,
        "error": None,
    }
    anew: Document = {
        "attempt": {"$add": ["$attempt", 1]},
        "started_at": "$$NOW",
        "turns": [],
        "num_prompt_tokens": 0,
        "num_output_tokens": 0,
        "num_tool_calls": 0,
        "min_version": "$$REMOVE",
        "max_version": "$$REMOVE",
    }
    if resumable:
        anew = {name: {"$cond": [MAY_BE_TAKEN_UP, f"${name}", new]} for name, new in anew.items()}
    return [
        {"$set": {**begun, **anew}},
        {
            "$set": {
                "lease": lease(owner, "$fence", lease_seconds),
                "attempts": {"$concatArrays": ["$attempts", [attempt]]},
            }
        },
    ]
