"""Retention: the turns of old steps are removed in bounded batches while the run goes on.

    steps ──> groups that they consumed ──> marked `expired_at` ──> turns, their trainings and blobs
                                                                    removed

What stays: questions, records with their scores and attempts, the ledger, and the figures of every
step. Only whole groups expire, when the last step that used one of their records does. Every query is
answered by an index, so a pass costs the same in a run's last step as in its first.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from agentrl.schema.base import Value
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import shown
from agentrl.store.repositories.runs import DEFAULT_CONSUMER
from agentrl.store.repositories.unused_blobs import GRACE, UnusedBlobs

RECORDS_AT_ONCE = 128
BLOBS_AT_ONCE = 500
_ENTRY = f"ledger.{DEFAULT_CONSUMER}"
_CONSUMED = frozenset({"dropped", "trained"})


class ExpiringStep(Value):
    """What expires with one step."""

    batches: tuple[tuple[str, ...], ...] = ()
    """Ids of whole groups, in batches of a bounded number of records."""
    waits_for: str = ""
    """The trainer that still has to consume one of them; nothing expires before."""


class RetentionRepository(Repository):
    """Removes the turns of groups that steps consumed, one step after the other."""

    def __init__(self, database: RunDatabase, blobs: UnusedBlobs) -> None:
        super().__init__(database)
        self._blobs = blobs

    @operation("read which steps expired")
    async def expired_step(self) -> int:
        """Return the last step whose groups have expired."""
        run = await self._db.runs.find_one({}, {"expired_step": 1})
        return 0 if run is None else int(run.get("expired_step", 0))

    @operation("find expiring groups")
    async def of_step(self, step: int) -> ExpiringStep:
        """Return the groups that expire with a step.

        They are complete groups that the run's trainer used in this step for the last time, and the
        evaluations of its version. A group stays if a fork continues one of its records, or if a
        finished record of it has no score yet.
        """
        used = {f"{_ENTRY}.status": {"$in": ["dropped", "reserved", "trained"]}}
        found = self._db.record_data.find({**used, f"{_ENTRY}.step": step}, {"task_id": 1})
        task_ids = {one["task_id"] async for one in found}
        groups = await self._members(task_ids | await self._evaluations(step))
        others = await self._other_trainers(step)
        kept = await self._forked(groups)
        expiring: dict[str, int] = {}
        for task_id, members in groups.items():
            if task_id in kept or any(map(_is_unscored, members)):
                continue
            if members[0]["split"] == "train":
                entries = [_entry_of(member, DEFAULT_CONSUMER) for member in members]
                if any((entry.get("step") or 0) > step for entry in entries):
                    continue  # it expires with that step
                waits_for = _waiting_trainer([DEFAULT_CONSUMER, *others], members)
                if waits_for:
                    return ExpiringStep(waits_for=waits_for)
            expiring[task_id] = len(members)
        return ExpiringStep(batches=tuple(_in_batches(expiring)))

    async def _members(self, task_ids: Collection[str]) -> dict[str, list[Document]]:
        """Return the records of complete groups, by task."""
        groups: defaultdict[str, list[Document]] = defaultdict(list)
        columns = shown("task_id", "split", "group_completed", "outcome", "score", "ledger")
        found = self._db.record_data.find({"task_id": {"$in": sorted(task_ids)}}, columns)
        async for member in found:
            groups[member["task_id"]].append(member)
        return {
            task_id: members
            for task_id, members in sorted(groups.items())
            if all(member["group_completed"] for member in members)
        }

    async def _evaluations(self, step: int) -> set[str]:
        """Return the ids of the tasks that evaluated a step's version.

        Those that evaluated the initial weights belong to the first step.
        """
        versions = f"(0|{step})" if step == 1 else str(step)
        tag = {"$gt": "", "$regex": re.compile(rf"^eval@{versions}(\.\d+)?$")}
        found = self._db.tasks.find({"tag": tag, "status": "completed"}, {"_id": 1})
        return {task["_id"] async for task in found}

    async def _other_trainers(self, step: int) -> list[str]:
        """Return the further trainers that consume the groups of a step."""
        run = await self._db.runs.find_one({}, {"trainer_leases": 1, "retrains": 1}) or {}
        repeated = run.get("retrains", {})
        done = {name for name, origin in repeated.items() if origin["last_step"] < step}
        return sorted(run.get("trainer_leases", {}).keys() - {DEFAULT_CONSUMER} - done)

    async def _forked(self, task_ids: Iterable[str]) -> set[str]:
        found = self._db.forks.find({"task_id": {"$in": list(task_ids)}}, {"task_id": 1})
        return {fork["task_id"] async for fork in found}

    @operation("expire groups", repeatable=False)
    async def expire(self, task_ids: Sequence[str]) -> int:
        """Remove the turns of groups, their trainings, and the blobs that nobody else uses.

        May be repeated after a crash.

        Args:
            task_ids: a batch of `of_step`.

        Returns:
            The number of turns removed.
        """
        of_groups: Document = {"task_id": {"$in": list(task_ids)}}
        of_kept = {**of_groups, "expired_at": None}
        # The records first: whoever reads them from now on expects no turns.
        for collection in (self._db.record_data, self._db.records):
            await collection.update_many(of_kept, {"$currentDate": {"expired_at": True}})
        records = self._db.records.find(of_groups, {"_id": 1})
        of_records = {"record_id": {"$in": [one["_id"] async for one in records]}}
        turns = self._db.turns.find({**of_records, "blobs": {"$exists": True}}, {"blobs": 1})
        keys = {key async for turn in turns for key in turn["blobs"]}
        await self._db.turn_training.delete_many(of_records)
        removed = await self._db.turns.delete_many(of_records)
        if await self._blobs.are_named():
            await self._blobs.mark(keys)
            await self._blobs.remove(GRACE, BLOBS_AT_ONCE)
        return removed.deleted_count

    @operation("note that a step expired")
    async def finish_step(self, step: int) -> None:
        """Note that all groups of a step have expired."""
        await self._db.runs.update_one({}, {"$max": {"expired_step": step}})


def _entry_of(member: Document, consumer: str) -> Document:
    entry: Document = (member.get("ledger") or {}).get(consumer) or {}
    return entry


def _is_unscored(member: Document) -> bool:
    """Whether a rollout finished and has no score, which `store rescore` may still give it."""
    return member.get("outcome") is not None and member.get("score") is None


def _waiting_trainer(consumers: Iterable[str], members: Sequence[Document]) -> str:
    """Return a trainer that has not consumed all records of a group, or an empty text."""
    for consumer in consumers:
        if any(_entry_of(member, consumer).get("status") not in _CONSUMED for member in members):
            return consumer
    return ""


def _in_batches(sizes: dict[str, int]) -> Iterable[tuple[str, ...]]:
    batch: list[str] = []
    num_records = 0
    for task_id, size in sizes.items():
        if batch and num_records + size > RECORDS_AT_ONCE:
            yield tuple(batch)
            batch, num_records = [], 0
        batch.append(task_id)
        num_records += size
    if batch:
        yield tuple(batch)
