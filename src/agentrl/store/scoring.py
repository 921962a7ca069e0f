"""Scores: facts with an origin; a missing one is tried again and never becomes 0."""

from pymongo import ReturnDocument

from agentrl.schema import DispatchedSamplingTask, Record, Score, Task
from agentrl.store.codec import encode, from_document, task_from_document
from agentrl.store.door import first, operation
from agentrl.store.expressions import (
    LEASE_EXPIRED,
    NEXT_FENCE,
    held,
    lease,
    literal,
    may_become,
    nobodys_lease,
)
from agentrl.store.slots import SlotDoor, lease_lost
from agentrl.store.turns import TurnDoor


class ScoringDoor(SlotDoor, TurnDoor):
    """Scores finished Records."""

    @operation("claim a scoring", repeatable=False)
    async def claim_scoring(
        self, owner: str, lease_seconds: float
    ) -> tuple[Record, Task, list[DispatchedSamplingTask]] | None:
        """Claim a finished Record that nobody is scoring: its scorer died or put it off.

        Returns:
            The Record under a new lease, its Task and its turns; None when there is none.
        """
        document = await self._records.find_one_and_update(
            {"status": "finished", **LEASE_EXPIRED},
            [{"$set": {"fence": NEXT_FENCE, "lease": lease(owner, NEXT_FENCE, lease_seconds)}}],
            sort=[("lease.expires_at", 1)],
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            return None
        record = from_document(Record, document)
        task = await self._tasks.find_one({"_id": record.task_id})
        turns = await self.read_turns(record.turns)
        return record, task_from_document(first(task, f"task {record.task_id!r}")), turns

    @operation("store a score")
    async def set_score(self, record_id: str, fence: int, score: Score) -> Record:
        """Store the score of a finished Record, and complete its group when it was the last.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        document = await self._records.find_one_and_update(
            {**held(record_id, fence), "status": may_become("scored")},
            {
                "$set": {
                    "status": "scored",
                    "score": encode(score.model_dump()),
                    "error": None,
                    "lease": None,
                }
            },
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            # A repeated request finds its own work done; the fence says that it was its own.
            done = {"_id": record_id, "fence": fence, "status": "scored"}
            document = await self._records.find_one(done)
        if document is None:
            raise lease_lost(record_id, fence)
        record = from_document(Record, document)
        await self.complete_group(record.task_id)
        return record

    @operation("put a scoring off")
    async def put_off_scoring(
        self, record_id: str, fence: int, error: str, retry_seconds: float
    ) -> None:
        """Leave a Record unscored for now; anybody may claim its scoring after `retry_seconds`.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        result = await self._records.update_one(
            {**held(record_id, fence), "status": "finished"},
            [{"$set": {"error": literal(encode(error)), "lease": nobodys_lease(retry_seconds)}}],
        )
        if result.matched_count == 0:
            raise lease_lost(record_id, fence)
