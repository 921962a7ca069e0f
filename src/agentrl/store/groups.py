"""Groups complete exactly once, and whatever a crash left half done is found and finished."""

from collections.abc import Collection
from dataclasses import dataclass

from agentrl.schema import RECORD_TRANSITIONS, TERMINAL_STATUSES, DBRecordData, Record
from agentrl.store.codec import Document, from_document, task_version, to_document
from agentrl.store.door import Door, operation
from agentrl.store.expressions import LEASE_EXPIRED, attempt_failed, held, may_become
from agentrl.store.writes import insert_new

TERMINAL: Document = {"$in": sorted(TERMINAL_STATUSES)}
UNFINISHED = sorted(set(RECORD_TRANSITIONS) - TERMINAL_STATUSES)
REAP_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class ReapCounts:
    """What one call of `reap` put right."""

    num_expired: int
    """Attempts that ended because their lease expired."""
    num_groups_completed: int
    """Groups that were complete without anybody having said so."""


class GroupDoor(Door):
    """Completes groups, and reaps what dead processes left."""

    @operation("complete a group")
    async def complete_group(self, task_id: str) -> bool:
        """Complete the group if all its Records are scored or failed.

        Every step may be repeated, by any number of processes at once, so a crash between two of
        them is repaired by calling again.

        Returns:
            True for exactly one of all callers: the one whose write completed the Task.
        """
        return bool(await self._complete_groups({task_id}))

    async def _complete_groups(self, task_ids: Collection[str]) -> set[str]:
        """Complete those of the groups whose Records are all at their end.

        Returns:
            The ids of the tasks that this call completed; each is returned to one caller only.
        """
        if not task_ids:
            return set()
        unfinished = await self._records.distinct(
            "task_id", {"task_id": {"$in": sorted(task_ids)}, "status": {"$in": UNFINISHED}}
        )
        ended = set(task_ids) - set(unfinished)
        return {task_id for task_id in sorted(ended) if await self._complete(task_id)}

    async def _complete(self, task_id: str) -> bool:
        cursor = self._records.find({"task_id": task_id})
        records = [from_document(Record, document) async for document in cursor]
        task = await self._tasks.find_one({"_id": task_id})
        if task is None or task["num_generations"] != len(records):
            return False  # its slots are still being added
        version = task_version(task)
        await insert_new(self._record_data, [_record_data(record, version) for record in records])
        result = await self._tasks.update_one(
            {"_id": task_id, "status": "created"},
            {"$set": {"status": "completed"}, "$currentDate": {"completed_at": True}},
        )
        await self._record_data.update_many(
            {"task_id": task_id, "group_completed": False}, {"$set": {"group_completed": True}}
        )
        # Last: while a record of the group is still open, a reaper will look at it again.
        await self._records.update_many(
            {"task_id": task_id, "group_open": True}, {"$unset": {"group_open": ""}}
        )
        return result.modified_count == 1

    @operation("reap")
    async def reap(self, max_attempts: int) -> ReapCounts:
        """Take back expired leases, and finish what a crash left half done in groups.

        Any process may call it, any number at once.
        """
        return ReapCounts(
            num_expired=await self._reap_expired(max_attempts),
            num_groups_completed=await self._reap_groups(),
        )

    async def _reap_expired(self, max_attempts: int) -> int:
        """End the attempts whose lease expired; return how many this call ended."""
        num_expired = 0
        expired = self._records.find(
            {"status": "running", **LEASE_EXPIRED}, {"task_id": 1, "lease": 1, "attempts": 1}
        )
        for found in await expired.limit(REAP_BATCH).to_list():
            lease = found["lease"]
            error = f"the lease of {lease['owner']} expired"
            result = await self._records.update_one(
                {
                    **held(found["_id"], lease["fence"]),
                    **LEASE_EXPIRED,  # its holder may have renewed it since
                    "status": may_become("failed"),
                },
                attempt_failed("expired", error, max_attempts),
            )
            if result.modified_count:
                num_expired += 1
                await self._complete_groups({found["task_id"]})
        return num_expired

    async def _reap_groups(self) -> int:
        task_ids = await self._records.distinct("task_id", {"group_open": True, "status": TERMINAL})
        return len(await self._complete_groups(task_ids))


def _record_data(record: Record, version: str) -> Document:
    """Return the trainer's view of a finished Record, without its turns."""
    data = DBRecordData(
        record_id=record.id,
        task_id=record.task_id,
        traj_id=record.traj_id,
        split=record.split,
        order=record.order,
        attempt=record.attempt,
        outcome=record.outcome,
        score=record.score,
        more_scores=record.more_scores,
        turn_ids=record.turns,
        num_tokens=record.num_prompt_tokens + record.num_output_tokens,
        min_version=record.min_version,
        max_version=record.max_version,
        task_version=version,
    )
    document = to_document(data)
    del document["turns"]
    return document
