"""Content-addressed values that many turns share, and values too large for one document.

A blob is `{_id: sha256, kind, value, num_bytes}`. One that would come near MongoDB's 16 MB limit is
`{_id: sha256, kind, num_bytes, num_parts}` with parts `{_id: "sha256/0", data}` beside it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import bson
from bson import Binary
from bson.codec_options import CodecOptions
from pymongo.asynchronous.collection import AsyncCollection

from agentrl.errors import StoreError
from agentrl.store.codec import Document
from agentrl.store.writes import insert_new

PART_BYTES = 8 * 2**20
_REMEMBERED = 8192
_CODEC: CodecOptions[Document] = CodecOptions(tz_aware=True)


class BlobStore:
    """Writes each value once, and reads many at a time."""

    def __init__(self, collection: AsyncCollection[Document]) -> None:
        self._collection = collection
        self._stored: OrderedDict[str, None] = OrderedDict()

    async def put(self, blobs: Iterable["Blob"]) -> None:
        """Make the blobs durable. What this process stored before costs nothing."""
        fresh = {blob.key: blob for blob in blobs if blob.key not in self._stored}
        documents = [document for blob in fresh.values() for document in blob.documents()]
        if not documents:
            return
        await insert_new(self._collection, documents)
        self._stored.update(dict.fromkeys(fresh))
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
        async for document in self._collection.find({"_id": {"$in": sorted(wanted)}}):
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
        parts = {
            part["_id"]: part["data"]
            async for part in self._collection.find({"_id": {"$in": keys}})
        }
        if len(parts) != len(keys):
            raise StoreError(f"blob {head['_id']} is incomplete")
        return bson.decode(b"".join(parts[key] for key in keys), _CODEC)["value"]


class Blob:
    """One value on its way into the store.

    Example:
        `Blob("tools", schemas).key` is what a turn keeps in place of `schemas`.
    """

    def __init__(self, kind: str, value: Any) -> None:
        self.kind = kind
        self.value = value
        self._encoded = bson.encode({"value": value})
        self.key = hashlib.sha256(self._encoded).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Size of the value in BSON."""
        return len(self._encoded)

    def documents(self) -> list[Document]:
        """Return the documents that hold the blob, head last."""
        head: Document = {"_id": self.key, "kind": self.kind, "num_bytes": self.num_bytes}
        if self.num_bytes <= PART_BYTES:
            return [{**head, "value": self.value}]
        starts = range(0, self.num_bytes, PART_BYTES)
        parts: list[Document] = [
            {
                "_id": f"{self.key}/{number}",
                "data": Binary(self._encoded[start : start + PART_BYTES]),
            }
            for number, start in enumerate(starts)
        ]
        return [*parts, {**head, "num_parts": len(parts)}]
