"""Moves of Records along their lifecycle by the holder of the lease, many in one request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.asynchronous.database import AsyncDatabase

from agentrl.errors import LeaseLost
from agentrl.schema import RecordStatus, task_of_record
from agentrl.store.coalesce import Coalescer
from agentrl.store.codec import Document
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

    async def _move_all(self, moves: Sequence[Move]) -> list[LeaseLost | None]:
        matched = await update_each(
            self._records,
            [
                (
                    {**held(move.record_id, move.fence), "status": may_become(move.to)},
                    [{"$set": {**move.update, "status": move.to}}],
                )
                for move in moves
            ],
        )
        refused = {} if matched == len(moves) else await self._not_moved(moves)
        ended = {
            task_of_record(move.record_id)
            for move in moves
            if move.to == "scored" and move.record_id not in refused
        }
        await self._complete_groups(ended)
        return [refused.get(move.record_id) for move in moves]

    async def _not_moved(self, moves: Sequence[Move]) -> dict[str, LeaseLost]:
        """Return the error, by record id, of the moves that did not take place.

        A record in the status under the mover's own fence was moved by it: now, or by an earlier
        try of the same request whose answer was lost.
        """
        cursor = self._records.find(
            {"_id": {"$in": [move.record_id for move in moves]}}, {"status": 1, "fence": 1}
        )
        found = {document["_id"]: document async for document in cursor}
        return {
            move.record_id: lease_lost(move.record_id, move.fence)
            for move in moves
            if move.record_id not in found
            or (found[move.record_id]["status"], found[move.record_id]["fence"])
            != (move.to, move.fence)
        }
