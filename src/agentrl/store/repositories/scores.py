"""Scores of Records. Every score names its scorer; a missing score is retried and never becomes 0.

Input: claims for scoring, first scores, further scores and postponements. Independent
of scorers.
"""

from collections.abc import Mapping

from pymongo import ReturnDocument

from agentrl.errors import LeaseLost, StoreError
from agentrl.schema import Record, Score, Task
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import encode, from_document, require
from agentrl.store.documents.expressions import (
    NEXT_FENCE,
    NO_HOLDER,
    UNSCORABLE,
    lease,
    literal,
    waiting_lease,
)
from agentrl.store.repositories.fenced_records import FencedRecords
from agentrl.store.repositories.task_groups import TaskRepository


class ScoreRepository(Repository):
    """Scores finished Records."""

    def __init__(self, database: RunDatabase, tasks: TaskRepository, fenced: FencedRecords) -> None:
        super().__init__(database)
        self._tasks = tasks
        self._fenced = fenced

    @operation("claim a scoring", repeatable=False)
    async def claim(self, owner: str, lease_seconds: float) -> tuple[Record, Task] | None:
        """Claim a finished Record without an active scorer: its scorer died or postponed it.

        Returns:
            The Record under a new lease, and its Task; None when there is none.
        """
        now = await self._db.server_time()
        # After an outage, live scorers must renew first; a waiting Record has no holder.
        is_settled = self._db.clock.is_settled(lease_seconds)
        unheld = {} if is_settled else {"lease.owner": ""}
        # The status stays `finished`: only the lease shows that a process is scoring the Record.
        # The Record whose lease expired first is scored first.
        document = await self._db.records.find_one_and_update(
            {"status": "finished", "lease.expires_at": {"$lt": now}, **unheld},
            [{"$set": {"fence": NEXT_FENCE, "lease": lease(owner, NEXT_FENCE, lease_seconds)}}],
            sort=[("lease.expires_at", 1)],
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            return None
        record = from_document(Record, document)
        return record, await self._tasks.of_claimed(record)

    @operation("store a score")
    async def set(self, record_id: str, fence: int, score: Score) -> None:
        """Store the score of a finished Record, and complete its group if it was the last one.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        update = {"score": literal(encode(score.model_dump())), "error": None, "lease": None}
        await self._fenced.move(record_id, fence, "scored", update)

    @operation("read a group's scores")
    async def of_group(self, task_id: str) -> dict[int, Score]:
        """Return the scores decided for a whole group, by `traj_id`; empty before the decision."""
        document = await self._db.tasks.find_one({"_id": task_id}, {"group_scores": 1})
        decided = require(document, f"task {task_id!r}").get("group_scores") or {}
        return {int(number): Score.model_validate(one) for number, one in decided.items()}

    async def decide_group(self, task_id: str, scores: Mapping[int, Score]) -> dict[int, Score]:
        """Store the scores of a whole group with its Task; return the scores that count.

        If several processes decide the same group, the scores of the first count for all Records.

        Args:
            task_id: the Task.
            scores: by `traj_id`, not empty.
        """
        is_first = await self._decide_group(task_id, scores)
        return dict(scores) if is_first else await self.of_group(task_id)

    @operation("decide a group")
    async def _decide_group(self, task_id: str, scores: Mapping[int, Score]) -> bool:
        decided = {str(number): encode(score.model_dump()) for number, score in scores.items()}
        undecided = {"_id": task_id, "group_scores": {"$in": [{}, None]}}
        change = {"$set": {"group_scores": decided}}
        return (await self._db.tasks.update_one(undecided, change)).modified_count > 0

    async def set_waiting(self, record_id: str, score: Score) -> bool:
        """Score a finished Record without a holder; return False if a process holds it."""
        try:
            await self.set(record_id, NO_HOLDER, score)
        except LeaseLost:
            return False
        return True

    @operation("give up a scoring")
    async def fail(self, record_id: str, fence: int, error: str) -> None:
        """Dead-letter a finished Record that cannot be scored; its group continues without it.

        Outcome and answer are kept, so that `repair` can score it later.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        update = {"error": literal(encode(error)), "lease": None}
        await self._fenced.move(record_id, fence, "failed", update)

    @operation("repair a scoring")
    async def repair(self, record_id: str, score: Score) -> bool:
        """Score a Record that `fail` dead-lettered, once its group is complete.

        A trainer that has not yet consumed the group uses the score.

        Returns:
            False if another process has repaired the Record in the meantime.

        Raises:
            StoreError: the Record has no rollout to score, or its group is not complete yet.
        """
        wanted = {"_id": record_id}
        record = await self._db.records.find_one({**wanted, "outcome": {"$ne": None}}, {"_id": 1})
        if record is None or not await self._db.record_data.count_documents(wanted, limit=1):
            raise StoreError(f"record {record_id!r}: nothing to score, or its group is incomplete")
        value = literal(encode(score.model_dump()))
        # The trainer's copy is written first: if the second write is lost, repeating both repairs
        # it.
        await self._db.record_data.update_one(
            {**wanted, "score": None}, [{"$set": {"score": value}}]
        )
        result = await self._db.records.update_one(
            {**wanted, **UNSCORABLE},
            [{"$set": {"score": value, "status": "scored", "error": None}}],
        )
        return result.modified_count > 0

    @operation("add a score")
    async def add(self, record_id: str, score: Score) -> bool:
        """Store a further score of a Record whose group is complete; existing scores are kept.

        Returns:
            False if the Record already has a score of this scorer and version.

        Raises:
            StoreError: the Record's group is not complete yet.
        """
        lacks_score = {
            "$nor": [
                {"score.scorer": score.scorer, "score.version": score.version},
                {"more_scores": {"$elemMatch": {"scorer": score.scorer, "version": score.version}}},
            ]
        }
        push = {"$push": {"more_scores": encode(score.model_dump())}}
        # The trainer's copy first. The result depends on the second write, so if that is lost, the
        # caller repeats both, and the first has no further effect.
        copied = await self._db.record_data.update_one({"_id": record_id, **lacks_score}, push)
        if copied.matched_count == 0 and not await self._db.record_data.count_documents(
            {"_id": record_id}, limit=1
        ):
            raise StoreError(f"the group of record {record_id!r} is incomplete")
        result = await self._db.records.update_one({"_id": record_id, **lacks_score}, push)
        return result.modified_count > 0

    @operation("postpone a scoring")
    async def postpone(
        self, record_id: str, fence: int, error: str | None, retry_seconds: float
    ) -> None:
        """Leave a Record unscored for now; any scorer may claim it after `retry_seconds`.

        Args:
            record_id: the Record.
            fence: fencing token of the caller's lease.
            error: the failure; None if it only waits for the rest of its group.
            retry_seconds: how long no scorer may claim it.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        update = {"error": literal(encode(error)), "lease": waiting_lease(retry_seconds)}
        self._db.leases.forget(record_id)
        await self._fenced.update(record_id, fence, "finished", update)
