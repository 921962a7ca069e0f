"""Scores: facts with an origin; a missing one is tried again and never becomes 0."""

from pymongo import ReturnDocument

from agentrl.schema import DispatchedSamplingTask, Record, Score, Task
from agentrl.store.codec import encode, from_document
from agentrl.store.door import operation
from agentrl.store.expressions import (
    LEASE_EXPIRED,
    NEXT_FENCE,
    held,
    lease,
    lease_lost,
    literal,
    nobodys_lease,
)
from agentrl.store.slots import SlotDoor
from agentrl.store.transitions import Move
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
        return record, await self._task_of(record), await self._read_turns(record.turns)

    @operation("store a score")
    async def set_score(self, record_id: str, fence: int, score: Score) -> Record:
        """Store the score of a finished Record, and complete its group when it was the last.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        update = {"score": literal(encode(score.model_dump())), "error": None, "lease": None}
        return await self._moves.submit(
            Move(record_id=record_id, fence=fence, to="scored", update=update)
        )

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
