"""Writes to a Record that only the holder of its lease may make.

Every update filters on the fencing token of the lease (`held`) and on a status from which the move
is legal (`may_become`), in the same atomic write. A process that was paused until its lease expired
therefore changes nothing when it wakes: its filter matches no document, and it gets `LeaseLost`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import LeaseLost
from agentrl.schema import TERMINAL_STATUSES, RecordStatus, task_of_record
from agentrl.store.database import Repository, RunDatabase
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import held, lease_lost, may_become
from agentrl.store.repositories.task_groups import GroupRepository
from agentrl.store.writes import Coalescer, update_each


@dataclass(frozen=True, kw_only=True)
class _Move:
    """The transition of one Record to a status."""

    record_id: str
    fence: int
    to: RecordStatus
    update: Document


class FencedRecords(Repository):
    """Moves and updates Records. Its methods run inside an operation of a repository."""

    def __init__(self, database: RunDatabase, groups: GroupRepository) -> None:
        super().__init__(database)
        self._groups = groups
        self._moves = Coalescer(self._move_all)

    async def move(self, record_id: str, fence: int, to: RecordStatus, update: Document) -> None:
        """Move a Record to status `to`; concurrent moves travel in one request.

        A move may be repeated: one that already took place under this fence counts as done. A
        Record that reaches a terminal status completes its group when it was the last.

        Args:
            record_id: the Record.
            fence: fencing token of the caller's lease.
            to: the new status.
            update: expressions of the fields that change in addition to `status`.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        await self._moves.submit(_Move(record_id=record_id, fence=fence, to=to, update=update))

    async def update(
        self, record_id: str, fence: int, status: Document | RecordStatus, update: Document
    ) -> None:
        """Set fields of a Record whose status fits the filter `status`.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        result = await self._db.records.update_one(
            {**held(record_id, fence), "status": status}, [{"$set": update}]
        )
        if result.matched_count == 0:
            raise lease_lost(record_id, fence)

    async def _move_all(self, moves: Sequence[_Move]) -> list[LeaseLost | None]:
        matched = await update_each(
            self._db.records,
            [
                (
                    {**held(move.record_id, move.fence), "status": may_become(move.to)},
                    [{"$set": {**move.update, "status": move.to}}],
                )
                for move in moves
            ],
        )
        refused = {} if matched == len(moves) else await self._refused_moves(moves)
        # Refused moves are included: a repeated move without a holder looks refused although it took
        # place. This is safe, because a group is completed only if all of its Records have ended.
        ended = [move.record_id for move in moves if move.to in TERMINAL_STATUSES]
        for record_id in ended:
            self._db.leases.forget(record_id)
        # While this process holds another Record of a group, the group cannot be complete: no query
        # is needed. A renewal whose reply arrives after its Record ended looks like a held lease; the
        # reaper then completes the group.
        tasks = {task_of_record(record_id) for record_id in ended}
        await self._groups.complete({one for one in tasks if not self._db.leases.holds_of(one)})
        return [refused.get(move.record_id) for move in moves]

    async def _refused_moves(self, moves: Sequence[_Move]) -> dict[str, LeaseLost]:
        """Return the error, by record id, of the moves that did not take place.

        A record in the status under the mover's own fence was moved by it: now, or by an earlier
        attempt at the same request whose reply was lost.
        """
        cursor = self._db.records.find(
            {"_id": {"$in": [move.record_id for move in moves]}}, {"status": 1, "fence": 1}
        )
        moved = {(found["_id"], found["status"], found["fence"]) async for found in cursor}
        return {
            move.record_id: lease_lost(move.record_id, move.fence)
            for move in moves
            if (move.record_id, move.to, move.fence) not in moved
        }
