"""Blobs that nothing refers to any more: found by indexes, removed while the run goes on.

Nobody counts the users of a blob. One without users is marked, and removed a while later if it is
still marked and unused: a process that stores its value again takes the mark away, and one that
relies on having stored it (`blobs.TRUSTED_SECONDS`) has written its turn by then.
"""

import asyncio
from collections.abc import Collection, Iterable
from datetime import timedelta

from pymongo import DeleteOne

from agentrl.schema.image import stored_address
from agentrl.store.database import FORKS_PREFIX, Repository
from agentrl.store.documents.codec import Document
from agentrl.store.documents.expressions import after
from agentrl.store.repositories.blobs import TRUSTED_SECONDS

GRACE = timedelta(seconds=6 * TRUSTED_SECONDS)
"""How long a blob stays after its last user was removed."""
_AT_ONCE = 32
_PAGE = 500


class UnusedBlobs(Repository):
    """Finds and removes blobs without users. Its methods run inside an operation."""

    async def unreferenced(
        self, keys: Iterable[str], *, but_for: Collection[str] = frozenset()
    ) -> list[str]:
        """Return the blobs that no turn, fork or question refers to, in the order of `keys`.

        Args:
            keys: of the blobs.
            but_for: ids of turns that do not count.
        """
        wanted = list(keys)
        unused: list[str] = []
        for start in range(0, len(wanted), _AT_ONCE):
            part = wanted[start : start + _AT_ONCE]
            used = await asyncio.gather(*(self._is_used(key, but_for) for key in part))
            unused += [key for key, is_used in zip(part, used, strict=True) if not is_used]
        return unused

    async def _is_used(self, key: str, but_for: Collection[str]) -> bool:
        users: list[tuple[str, Document]] = [
            ("turns", {"blobs": key}),
            (f"{FORKS_PREFIX}turns", {"blobs": key}),
            ("tasks", {"images": stored_address(key)}),
        ]
        for name, wanted in users:
            async for user in self._db[name].find(wanted, {"_id": 1}):
                if user["_id"] not in but_for:
                    return True
        return False

    async def mark(self, keys: Iterable[str]) -> None:
        """Mark those of the blobs that have no users."""
        unused = await self.unreferenced(keys)
        unmarked = {"_id": {"$in": unused}, "unused_since": {"$exists": False}}
        await self._db.blobs.update_many(unmarked, {"$currentDate": {"unused_since": True}})

    async def remove(self, unused_for: timedelta, limit: int) -> int:
        """Remove blobs that were marked long ago and still have no users; return how many.

        Blobs in parts stay: a part that another process stores again at this moment would be
        missing. `remove_at_rest` removes them.
        """
        since = {"$lte": ["$unused_since", after(-unused_for.total_seconds())]}
        marked = {
            "unused_since": {"$exists": True},
            "num_parts": {"$exists": False},
            "$expr": since,
        }
        found = self._db.blobs.find(marked, {"unused_since": 1}).sort("unused_since", 1)
        dates = {one["_id"]: one["unused_since"] async for one in found.limit(limit)}
        unused = set(await self.unreferenced(dates))
        used = [key for key in dates if key not in unused]
        await self._db.blobs.update_many({"_id": {"$in": used}}, {"$unset": {"unused_since": ""}})
        if not unused:
            return 0
        removals = [DeleteOne({"_id": key, "unused_since": dates[key]}) for key in sorted(unused)]
        return (await self._db.blobs.bulk_write(removals, ordered=False)).deleted_count

    async def remove_at_rest(self, keys: Iterable[str]) -> None:
        """Remove blobs with their parts at once; no process may work on the run."""
        for key in keys:
            parts = {"_id": {"$gte": f"{key}/", "$lt": f"{key}0"}}
            await self._db.blobs.delete_many(parts)
            await self._db.blobs.delete_one({"_id": key})

    async def all_unreferenced(self, *, but_for: Collection[str]) -> dict[str, int]:
        """Return key -> bytes of every blob that nothing but these turns refers to."""
        unused: dict[str, int] = {}
        page: dict[str, int] = {}
        async for blob in self._db.blobs.find({"num_bytes": {"$exists": True}}, {"num_bytes": 1}):
            page[blob["_id"]] = blob["num_bytes"]
            if len(page) == _PAGE:
                unused |= {key: page[key] for key in await self.unreferenced(page, but_for=but_for)}
                page = {}
        return unused | {key: page[key] for key in await self.unreferenced(page, but_for=but_for)}

    async def are_named(self) -> bool:
        """Return whether all turns list their blobs; those of runs before 0.2.0 do not."""
        run = await self._db.runs.find_one({}, {"turns_name_blobs": 1})
        return run is None or bool(run.get("turns_name_blobs"))
