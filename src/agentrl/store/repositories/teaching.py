"""Teachers: models whose logprobs at the sampled tokens are kept with the turns.

Input: claims of ended records, and the logprobs that a teacher gave their turns. A fact is written
once and never changed, so two processes that teach the same record do no harm: the lease of a claim
only keeps them from computing the same. Independent of servers and models.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from pymongo import IndexModel, ReturnDocument

from agentrl.errors import ConfigError
from agentrl.schema import DBRecordData, DispatchedSamplingTask, Teacher
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document, encode, from_document
from agentrl.store.documents.expressions import after, literal
from agentrl.store.repositories.turns import TurnRepository
from agentrl.store.writes import Update, update_each


class TeachingRepository(Repository):
    """Hands out records to teachers, and stores what they give."""

    def __init__(self, database: RunDatabase, turns: TurnRepository) -> None:
        super().__init__(database)
        self._turns = turns

    @operation("register a teacher")
    async def register(self, name: str, teacher: Teacher) -> None:
        """Join the run as a teacher.

        Raises:
            ConfigError: another model, or another setting, has this name.
        """
        field = f"teachers.{name}"
        await self._db.runs.update_one(
            {field: None}, {"$set": {field: encode(teacher.model_dump())}}
        )
        found = await self._db.runs.find_one({}, {field: 1})
        if found is None:
            raise self._db.no_run()
        known = Teacher.model_validate(found["teachers"][name])
        if known != teacher:
            fields = Teacher.model_fields
            what = next(one for one in fields if getattr(known, one) != getattr(teacher, one))
            raise ConfigError(
                f"--teacher {name}: the run has {getattr(known, what)!r} as the {what} of its "
                f"teacher {name}, not {getattr(teacher, what)!r}; give this one another name"
            )
        await self._db.record_data.create_indexes([_index(name)])

    @operation("show that a teacher is alive")
    async def show_alive(self, name: str, owner: str, seconds: float) -> None:
        """Show for a while that a process of this teacher is there, also while it loads its model."""
        field = f"teacher_processes.{name}"
        is_other = {"$ne": ["$$this.owner", literal(owner)]}
        is_alive = {"$gt": ["$$this.expires_at", "$$NOW"]}
        others = {
            "$filter": {
                "input": {"$ifNull": [f"${field}", []]},
                "cond": {"$and": [is_other, is_alive]},
            }
        }
        leases = {"$concatArrays": [others, [_lease(owner, seconds)]]}
        await self._db.runs.update_one({}, [{"$set": {field: leases}}])

    @operation("leave as a teacher")
    async def leave(self, name: str, owner: str) -> None:
        """Show that this process of the teacher is gone."""
        await self._db.runs.update_one(
            {}, {"$pull": {f"teacher_processes.{name}": {"owner": owner}}}
        )

    @operation("claim a record to teach")
    async def claim(self, name: str, owner: str, lease_seconds: float) -> DBRecordData | None:
        """Claim a training record of a complete group that this teacher has not seen.

        Records that no trainer has consumed come first.

        Returns:
            The record with its turns; None when there is none.
        """
        now = await self._db.server_time()
        lease = f"teaching.{name}"
        unclaimed = {"$or": [{lease: None}, {f"{lease}.expires_at": {"$lt": now}}]}
        choices: list[Document] = [{"ledger": {}}, {}]
        for preferred in choices:
            document = await self._db.record_data.find_one_and_update(
                {**_untaught(name), **unclaimed, **preferred},
                [{"$set": {lease: _lease(owner, lease_seconds)}}],
                sort=[("order", 1), ("traj_id", 1)],
                return_document=ReturnDocument.AFTER,
            )
            if document is not None:
                record = from_document(DBRecordData, document)
                turns = await self._turns.get_many(record.turn_ids)
                return record.model_copy(update={"turns": tuple(turns)})
        return None

    @operation("read a solved attempt")
    async def solution(
        self, record: DBRecordData, min_score: float
    ) -> list[DispatchedSamplingTask]:
        """Return the turns of the first other attempt of the group that was solved; [] without one.

        Args:
            record: for which it is shown.
            min_score: least score of a solved attempt.
        """
        other = await self._db.record_data.find_one(
            {
                "task_id": record.task_id,
                "traj_id": {"$ne": record.traj_id},
                "score.value": {"$gte": min_score},
            },
            sort=[("traj_id", 1)],
        )
        if other is None:
            return []
        return await self._turns.get_many(from_document(DBRecordData, other).stored_turn_ids)

    @operation("renew claims of records to teach")
    async def renew(
        self, name: str, owner: str, record_ids: Sequence[str], lease_seconds: float
    ) -> None:
        """Keep claimed records for longer."""
        lease = f"teaching.{name}"
        await self._db.record_data.update_many(
            {"_id": {"$in": list(record_ids)}, f"{lease}.owner": owner},
            [{"$set": {lease: _lease(owner, lease_seconds)}}],
        )

    @operation("release claims of records to teach")
    async def release(self, name: str, owner: str) -> None:
        """Let other processes claim at once what a process has claimed and not taught."""
        lease = f"teaching.{name}"
        await self._db.record_data.update_many({f"{lease}.owner": owner}, {"$unset": {lease: ""}})

    @operation("store a teacher's logprobs")
    async def store(self, name: str, record_id: str, logprobs: Mapping[str, np.ndarray]) -> None:
        """Store what a teacher gave the sampled tokens of a record; what is there stays.

        Args:
            name: of the teacher.
            record_id: the record.
            logprobs: turn id -> float32 [T], of every turn that has target tokens.
        """
        field = f"teacher_logprobs.{name}"
        updates: list[Update] = [
            ({"_id": turn_id, field: None}, {"$set": {field: encode(values)}})
            for turn_id, values in logprobs.items()
        ]
        # The turns first: after a crash in between, the record is taught again, with no effect.
        await update_each(self._db.turns, updates)
        await self._db.record_data.update_one(
            {"_id": record_id},
            [
                {"$set": {f"taught.{name}": "$$NOW"}},
                {"$unset": f"teaching.{name}"},
            ],
        )

    @operation("count records to teach")
    async def num_untaught(self, name: str) -> int:
        """Return how many training records of complete groups wait for a teacher."""
        return await self._db.record_data.count_documents(_untaught(name))


def _untaught(name: str) -> Document:
    return {"split": "train", "group_completed": True, f"taught.{name}": None}


def _lease(owner: str, lease_seconds: float) -> Document:
    return {"owner": literal(owner), "expires_at": after(lease_seconds)}


def _index(name: str) -> IndexModel:
    fields = ("split", "group_completed", f"taught.{name}", "order", "traj_id")
    return IndexModel([(field, 1) for field in fields], name=f"taught_{name}")
