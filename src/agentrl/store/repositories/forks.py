"""Forks: continuations of a turn, and their rollouts.

The rollouts are Records in `TrajectoryStore.forked`; this module stores where they branch off.
"""

import secrets
from collections.abc import Sequence

from agentrl.errors import StoreError
from agentrl.schema import Fork
from agentrl.store.database import Repository, operation
from agentrl.store.documents.codec import from_document, to_document

_PREFIX = "fork:"


def new_fork_id(record_id: str, turn: int) -> str:
    """Return an id for a fork of a Record."""
    return f"{_PREFIX}{record_id.removeprefix(_PREFIX)}@{turn}-{secrets.token_hex(2)}"


def is_of_fork(own_id: str) -> bool:
    """Return whether an id is a fork's, or that of one of its Records or turns."""
    return own_id.startswith(_PREFIX)


class ForkRepository(Repository):
    """Stores forks and finds them."""

    @operation("store a fork", repeatable=False)
    async def add(self, fork: Fork) -> None:
        """Store a fork; its Task is added to the store of the forks afterwards."""
        await self._db.forks.insert_one(to_document(fork))

    @operation("read a fork")
    async def of_record(self, record_id: str) -> Fork | None:
        """Return the fork that a Record belongs to; None for a rollout of the run."""
        if not is_of_fork(record_id):
            return None
        fork_id = record_id.rpartition("/")[0]
        document = await self._db.forks.find_one({"_id": fork_id})
        if document is None:
            raise StoreError(f"fork {fork_id!r} does not exist")
        return from_document(Fork, document)

    @operation("list forks")
    async def newest(self, limit: int) -> Sequence[Fork]:
        """Return the newest forks of the run, the newest first."""
        found = self._db.forks.find({}).sort("created_at", -1).limit(limit)
        return [from_document(Fork, document) async for document in found]

    @operation("read forks")
    async def of_task(self, task_id: str) -> Sequence[Fork]:
        """Return the forks of all rollouts of a question, the oldest first."""
        found = self._db.forks.find({"task_id": task_id}).sort("created_at", 1)
        return [from_document(Fork, document) async for document in found]
