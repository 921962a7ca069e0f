"""Turns: durable before the call returns, stored as what they added to their parent."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from pymongo.errors import DuplicateKeyError

from agentrl.errors import LeaseLost, StoreError
from agentrl.schema import DispatchedSamplingTask, ToolResult
from agentrl.store.blobs import Blob
from agentrl.store.codec import (
    Document,
    encode,
    float32_array,
    from_document,
    int32_array,
    to_document,
)
from agentrl.store.door import Door, boundary, operation
from agentrl.store.expressions import held

SHARED_BYTES = 256
"""A value of a root turn that is longer is stored as a blob: the group's tries share it."""
LARGE_BYTES = 2**20
"""A value of any turn that is longer is stored as a blob, so that no document meets 16 MB."""
PREVIEW_CHARS = 80
_BLOB = "blob"


class TurnDoor(Door):
    """Appends and reads turns."""

    @operation("append a turn")
    async def append_turn(self, turn: DispatchedSamplingTask, fence: int) -> None:
        """Store a turn; it is durable on return.

        Raises:
            LeaseLost: the caller's lease is gone; the turn is not part of the record.
        """
        document, blobs = pack(turn)
        await self._blobs.put(blobs)
        # The id holds the fence: only an earlier try of this very request can have written it.
        with suppress(DuplicateKeyError):
            await self._turns.insert_one(document)
        result = await self._records.update_one(
            {**held(turn.record_id, fence), "status": "running", "turns": {"$ne": turn.id}},
            _record_update(turn),
        )
        if result.matched_count == 0 and not await self._holds(turn.record_id, fence, turn.id):
            await self._turns.delete_one({"_id": turn.id})
            raise LeaseLost(f"record {turn.record_id!r}: the lease with fence {fence} is lost")

    @operation("store tool results")
    async def set_tool_results(
        self, turn_id: str, record_id: str, fence: int, results: Sequence[ToolResult]
    ) -> None:
        """Store what the tool calls of a turn led to.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        if not await self._holds(record_id, fence, turn_id):
            raise LeaseLost(f"record {record_id!r}: the lease with fence {fence} is lost")
        packed, blobs = _pack_values(
            "tool_result", [encode(result.model_dump()) for result in results], LARGE_BYTES
        )
        await self._blobs.put(blobs)
        await self._turns.update_one({"_id": turn_id}, {"$set": {"tool_results": packed}})

    async def _holds(self, record_id: str, fence: int, turn_id: str) -> bool:
        holding = {**held(record_id, fence), "status": "running", "turns": turn_id}
        return await self._records.find_one(holding, {"_id": 1}) is not None

    @operation("read turns")
    async def turns_of(
        self, record_id: str, attempt: int | None = None
    ) -> list[DispatchedSamplingTask]:
        """Return the turns of one attempt in order: the Record's current one, or any earlier."""
        if attempt is None:
            record = await self._records.find_one({"_id": record_id}, {"attempt": 1})
            if record is None:
                raise StoreError(f"record {record_id!r} does not exist")
            attempt = record["attempt"]
        found = self._turns.find({"record_id": record_id, "attempt": attempt}).sort("index", 1)
        return await self._unpack_all([document async for document in found])

    async def read_turns(self, turn_ids: Sequence[str]) -> list[DispatchedSamplingTask]:
        """Return the turns of these ids, in the order of the ids; one query a collection.

        Raises:
            StoreError: a turn is missing.
        """
        async with boundary("read turns", self._uri):
            found = {d["_id"]: d async for d in self._turns.find({"_id": {"$in": list(turn_ids)}})}
            missing = set(turn_ids) - found.keys()
            if missing:
                raise StoreError(f"turn {min(missing)!r} is missing from the database")
            return await self._unpack_all([found[turn_id] for turn_id in turn_ids])

    async def _unpack_all(self, documents: list[Document]) -> list[DispatchedSamplingTask]:
        blobs = await self._blobs.get(key for document in documents for key in blob_keys(document))
        return [unpack(document, blobs) for document in documents]


def pack(turn: DispatchedSamplingTask) -> tuple[Document, list[Blob]]:
    """Return the stored form of a turn and the blobs that it refers to.

    Where a value went into a blob, the document holds `{"blob": key}` and enough beside it for a
    person to recognise it.
    """
    document = to_document(turn)
    limit = SHARED_BYTES if turn.parent is None else LARGE_BYTES
    blobs: list[Blob] = []
    for field in ("added_ids", "tools"):
        document[field] = _pack(field, document[field], limit, blobs)
    for field in ("output_ids", "output_logprobs", "output_text"):
        document[field] = _pack(field, document[field], LARGE_BYTES, blobs)
    for field, bound in (("added_messages", limit), ("tool_results", LARGE_BYTES)):
        document[field], more = _pack_values(field, document[field], bound)
        blobs.extend(more)
    return document, blobs


def unpack(document: Document, blobs: dict[str, Any]) -> DispatchedSamplingTask:
    """Return the turn that `pack` stored."""
    fields = {name: _resolve(value, blobs) for name, value in document.items()}
    for name in ("added_messages", "tool_results"):
        fields[name] = [_resolve(value, blobs) for value in fields[name]]
    for name in ("added_ids", "output_ids"):
        fields[name] = int32_array(fields[name])
    fields["output_logprobs"] = float32_array(fields["output_logprobs"])
    return from_document(DispatchedSamplingTask, fields)


def blob_keys(document: Document) -> Iterable[str]:
    """Yield the keys of all blobs that a stored turn refers to."""
    for value in document.values():
        for item in value if isinstance(value, list) else (value,):
            if _is_reference(item):
                yield item[_BLOB]


def _pack(kind: str, value: Any, limit: int, blobs: list[Blob]) -> Any:
    if not value or (isinstance(value, str | bytes) and len(value) <= limit):
        return value
    blob = Blob(kind, value)
    if blob.num_bytes <= limit:
        return value
    blobs.append(blob)
    return {_BLOB: blob.key, **_preview(value)}


def _pack_values(kind: str, values: list[Document], limit: int) -> tuple[list[Any], list[Blob]]:
    blobs: list[Blob] = []
    return [_pack(kind, value, limit, blobs) for value in values], blobs


def _preview(value: Any) -> Document:
    if isinstance(value, bytes):
        return {"num_tokens": len(value) // 4}
    if isinstance(value, list):
        return {"names": [item.get("function", item).get("name", "") for item in value]}
    if isinstance(value, str):
        return {"preview": value[:PREVIEW_CHARS]}
    text = re.sub(r"\s+", " ", str(value.get("content", "")))
    return {
        "preview": text[:PREVIEW_CHARS],
        **{k: value[k] for k in ("role", "name") if k in value},
    }


def _resolve(value: Any, blobs: dict[str, Any]) -> Any:
    return blobs[value[_BLOB]] if _is_reference(value) else value


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get(_BLOB), str)


def _record_update(turn: DispatchedSamplingTask) -> Document:
    update: Document = {
        "$push": {"turns": turn.id},
        "$inc": {
            "num_prompt_tokens": len(turn.added_ids),
            "num_output_tokens": len(turn.output_ids),
            "num_tool_calls": sum(call.format_error is None for call in turn.tool_calls),
        },
    }
    versions = [span.version for span in turn.version_spans]
    if versions and turn.trainable:
        update["$min"] = {"min_version": min(versions)}
        update["$max"] = {"max_version": max(versions)}
    return update
