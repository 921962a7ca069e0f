"""Content-addressed values: stored once for any number of turns and tasks that refer to them.

A blob is `{_id: sha256, kind, value, num_bytes}`. One near MongoDB's 16 MB limit is
`{_id: sha256, kind, num_bytes, num_parts}`, with separate parts `{_id: "sha256/0", data}`.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from agentrl.errors import StoreError
from agentrl.schema.image import Image, stored_address, stored_key
from agentrl.store.database import Repository, RunDatabase, operation
from agentrl.store.documents.codec import Document
from agentrl.store.documents.packed_turns import Blob, joined
from agentrl.store.writes import insert_new

_REMEMBERED = 8192
TRUSTED_SECONDS = 600.0
"""How long a process relies on a blob that it stored. `unused_blobs` removes none before a blob has
been without a user for longer, so that a turn written meanwhile is seen."""


class BlobRepository(Repository):
    """Writes each value once, and reads many at a time. Its methods run inside an operation."""

    def __init__(self, database: RunDatabase) -> None:
        super().__init__(database)
        self._stored: OrderedDict[str, float] = OrderedDict()
        """Key -> when this process stored the blob."""

    async def put(self, blobs: Iterable[Blob]) -> None:
        """Make the blobs durable. Blobs that this process stored a short time ago are skipped."""
        now = time.monotonic()
        trusted_from = now - TRUSTED_SECONDS
        fresh = {
            blob.key: blob for blob in blobs if self._stored.get(blob.key, -math.inf) < trusted_from
        }
        documents = [document for blob in fresh.values() for document in blob.documents()]
        if not documents:
            return
        if await insert_new(self._db.blobs, documents) < len(documents):
            # Some exist, and may be about to be removed. In this order, the removal either sees
            # that they are used again, or comes before the insertion.
            unused = {"_id": {"$in": [*fresh]}, "unused_since": {"$exists": True}}
            await self._db.blobs.update_many(unused, {"$unset": {"unused_since": ""}})
            await insert_new(self._db.blobs, documents)
        self._stored.update(dict.fromkeys(fresh, now))
        for key in fresh:
            self._stored.move_to_end(key)
        while len(self._stored) > _REMEMBERED:
            self._stored.popitem(last=False)

    async def get(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the values of all `keys`, read with one query.

        Raises:
            StoreError: one of them is missing.
        """
        wanted = set(keys)
        if not wanted:
            return {}
        values: dict[str, Any] = {}
        async for document in self._db.blobs.find({"_id": {"$in": sorted(wanted)}}):
            if "num_parts" in document:
                values[document["_id"]] = await self._join(document)
            else:
                values[document["_id"]] = document["value"]
        missing = wanted - values.keys()
        if missing:
            raise StoreError(f"blob {min(missing)} is missing from the database")
        return values

    async def _join(self, head: Document) -> Any:
        keys = [f"{head['_id']}/{part}" for part in range(head["num_parts"])]
        found = self._db.blobs.find({"_id": {"$in": keys}})
        parts = {part["_id"]: part["data"] async for part in found}
        if len(parts) != len(keys):
            raise StoreError(f"blob {head['_id']} is incomplete")
        return joined([parts[key] for key in keys])


class ImageRepository(Repository):
    """Stores images by the hash of their content, and reads them."""

    def __init__(self, database: RunDatabase, blobs: BlobRepository) -> None:
        super().__init__(database)
        self._blobs = blobs

    @operation("store images")
    async def put(self, images: Sequence[Image]) -> list[str]:
        """Make the images durable; return their addresses."""
        blobs = [Blob("image", image.model_dump()) for image in images]
        await self._blobs.put(blobs)
        return [stored_address(blob.key) for blob in blobs]

    @operation("read images")
    async def get(self, addresses: Sequence[str]) -> list[Image]:
        """Return stored images, in the order of their addresses.

        Raises:
            StoreError: an address names no stored image.
        """
        keys = [stored_key(address) for address in addresses]
        found = await self._blobs.get(key for key in keys if key is not None)
        images = []
        for address, key in zip(addresses, keys, strict=True):
            if key is None:
                raise StoreError(f"{address[:80]!r} is not the address of a stored image")
            images.append(Image.model_validate(found[key]))
        return images


class SnapshotRepository(Repository):
    """Stores states of tools and environments by the hash of their content, and reads them."""

    def __init__(self, database: RunDatabase, blobs: BlobRepository) -> None:
        super().__init__(database)
        self._blobs = blobs

    @operation("store a snapshot")
    async def put(self, state: bytes) -> str:
        """Make a state durable; return its address."""
        blob = Blob("snapshot", state)
        await self._blobs.put([blob])
        return stored_address(blob.key)

    @operation("read a snapshot")
    async def get(self, address: str) -> bytes | None:
        """Return a stored state; None if it was removed."""
        key = stored_key(address)
        if key is None or await self._db.blobs.find_one({"_id": key}, {"_id": 1}) is None:
            return None
        state: bytes = (await self._blobs.get([key]))[key]
        return state
