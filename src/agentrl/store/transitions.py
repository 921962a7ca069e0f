"""Moves of Records along their lifecycle by the holder of the lease, many in one request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.asynchronous.database import AsyncDatabase

from agentrl.errors import LeaseLost
from agentrl.schema import Record, RecordStatus
from agentrl.store.coalesce import Coalescer
from agentrl.store.codec import Document, from_document
from agentrl.store.expressions import held, lease_lost, may_become
from agentrl.store.groups import GroupDoor
from agentrl.store.writes import update_each


@dataclass(frozen=True, kw_only=True)
class Move:
    """One Record on its way to a status."""

    record_id: str
    fence: int
    to: RecordStatus
    update: dict[str, Any]
    """Expressions of the fields that change beside `status`."""


class TransitionDoor(GroupDoor):
    """Moves Records; those that reach the end take their group with them."""

    def __init__(
        self, client: AsyncMongoClient[Document], database: AsyncDatabase[Document], uri: str
    ) -> None:
        super().__init__(client, database, uri)
        self._moves = Coalescer(self._move_all)

    async def _move_all(self, moves: Sequence[Move]) -> list[Record | LeaseLost]:
        await update_each(
            self._records,
            [
                (
                    {**held(move.record_id, move.fence), "status": may_become(move.to)},
                    [{"$set": {**move.update, "status": move.to}}],
                )
                for move in moves
            ],
        )
        cursor = self._records.find({"_id": {"$in": [move.record_id for move in moves]}})
        found = {document["_id"]: document async for document in cursor}
        # A record in the status under the mover's own fence was moved by it: now, or by an earlier
        # try of the same request whose answer was lost.
        moved = [
            from_document(Record, found[move.record_id])
            if move.record_id in found
            and (found[move.record_id]["status"], found[move.record_id]["fence"])
            == (move.to, move.fence)
            else lease_lost(move.record_id, move.fence)
            for move in moves
        ]
        ended = {r.task_id for r in moved if isinstance(r, Record) and r.status == "scored"}
        await self._complete_groups(ended)
        return moved
