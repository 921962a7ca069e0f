"""Turns: durable before the call returns, stored as what they added to their parent."""

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.asynchronous.database import AsyncDatabase

from agentrl.errors import LeaseLost, StoreError
from agentrl.schema import DispatchedSamplingTask, ToolResult
from agentrl.schema.image import stored_key
from agentrl.store.blobs import Blob
from agentrl.store.coalesce import Coalescer
from agentrl.store.codec import (
    Document,
    encode,
    float32_array,
    from_document,
    int32_array,
    to_document,
)
from agentrl.store.door import Door, operation
from agentrl.store.expressions import held, lease_lost
from agentrl.store.writes import Update, insert_new, update_each

SHARED_BYTES = 256
"""A value of a root turn that is longer is stored as a blob: the group's tries share it."""
LARGE_BYTES = 2**20
"""A value of any turn that is longer is stored as a blob, so that no document meets 16 MB."""
PREVIEW_CHARS = 80
_BLOB = "blob"
_WHOLE = (
    *("added_ids", "tools", "output_ids", "output_logprobs", "output_text"),
    "routed_experts",
)
_LISTS = ("added_messages", "tool_results")
"""Fields that may be blobs as a whole, and those whose items may be."""

_Append = tuple[DispatchedSamplingTask, int]
_Results = tuple[str, str, int, Sequence[ToolResult]]


class TurnDoor(Door):
    """Appends and reads turns."""

    def __init__(
        self, client: AsyncMongoClient[Document], database: AsyncDatabase[Document], uri: str
    ) -> None:
        super().__init__(client, database, uri)
        self._tools = ToolsPacker()
        self._appends = Coalescer(self._append_all)
        self._results = Coalescer(self._set_all_results)

    @operation("append a turn")
    async def append_turn(self, turn: DispatchedSamplingTask, fence: int) -> None:
        """Store a turn; it is durable on return.

        Raises:
            LeaseLost: the caller's lease is gone; the turn is not part of the record.
        """
        await self._appends.submit((turn, fence))

    async def _append_all(self, items: Sequence[_Append]) -> list[LeaseLost | None]:
        packed = [pack(turn, self._tools) for turn, _ in items]
        await self._blobs.put(blob for _, blobs in packed for blob in blobs)
        # The id of a turn holds the fence: only an earlier try of this very request can have
        # inserted it before.
        await insert_new(self._turns, [document for document, _ in packed])
        updates = [
            (
                {**held(turn.record_id, fence), "status": "running", "turns": {"$ne": turn.id}},
                _record_update(turn),
            )
            for turn, fence in items
        ]
        if await update_each(self._records, updates) == len(items):
            return [None] * len(items)
        refused, unknown = await self._refused(
            [(turn.id, turn.record_id, fence) for turn, fence in items]
        )
        await self._turns.delete_many({"_id": {"$in": unknown}})
        return [refused.get(turn.id) for turn, _ in items]

    @operation("store tool results")
    async def set_tool_results(
        self, turn_id: str, record_id: str, fence: int, results: Sequence[ToolResult]
    ) -> None:
        """Store what the tool calls of a turn led to.

        Raises:
            LeaseLost: the caller's lease is gone; nothing was written.
        """
        await self._results.submit((turn_id, record_id, fence, results))

    async def _set_all_results(self, items: Sequence[_Results]) -> list[LeaseLost | None]:
        refused, _ = await self._refused([(turn, rid, fence) for turn, rid, fence, _ in items])
        updates: list[Update] = []
        for turn_id, _, _, results in items:
            if turn_id not in refused:
                values = [encode(result.model_dump()) for result in results]
                packed, blobs = _pack_values("tool_results", values, LARGE_BYTES)
                await self._blobs.put(blobs)
                updates.append(({"_id": turn_id}, {"$set": {"tool_results": packed}}))
        if updates:
            await update_each(self._turns, updates)
        return [refused.get(turn_id) for turn_id, *_ in items]

    async def _refused(
        self, claims: list[tuple[str, str, int]]
    ) -> tuple[dict[str, LeaseLost], list[str]]:
        """Check (turn id, record id, fence) against the records.

        Returns:
            The error by turn id of those that their record does not bear out, and the ids of those
            turns that their record does not even name.
        """
        found = self._records.find(
            {"_id": {"$in": [record_id for _, record_id, _ in claims]}},
            {"status": 1, "lease.fence": 1, "turns": 1},
        )
        records = {document["_id"]: document async for document in found}
        refused, unknown = {}, []
        for turn_id, record_id, fence in claims:
            record = records.get(record_id, {"status": None, "turns": ()})
            held_by = (record.get("lease") or {}).get("fence")
            named = turn_id in record["turns"]
            if not named or record["status"] != "running" or held_by != fence:
                refused[turn_id] = lease_lost(record_id, fence)
            if not named:
                unknown.append(turn_id)
        return refused, unknown

    @operation("read turns")
    async def turns_of(
        self, record_id: str, attempt: int | None = None
    ) -> list[DispatchedSamplingTask]:
        """Return the turns of one attempt in order: the Record's current one, or any earlier."""
        record = await self._records.find_one({"_id": record_id}, {"attempt": 1, "turns": 1})
        if record is None:
            raise StoreError(f"record {record_id!r} does not exist")
        if attempt in (None, record["attempt"]):
            return await self._read_turns(record["turns"])
        found = self._turns.find({"record_id": record_id, "attempt": attempt}).sort("index", 1)
        # A holder may have died between storing a turn and having it acknowledged; whoever took
        # the attempt up then made that turn anew, under a higher fence.
        latest: dict[int, Document] = {}
        async for document in found:
            known = latest.get(document["index"])
            if known is None or _fence_of(known) < _fence_of(document):
                latest[document["index"]] = document
        return await self._unpack_all(list(latest.values()))

    @operation("read turns")
    async def read_turns(self, turn_ids: Sequence[str]) -> list[DispatchedSamplingTask]:
        """Return the turns of these ids, in the order of the ids; one query a collection.

        Raises:
            StoreError: a turn is missing.
        """
        return await self._read_turns(turn_ids)

    async def _read_turns(self, turn_ids: Sequence[str]) -> list[DispatchedSamplingTask]:
        found = {d["_id"]: d async for d in self._turns.find({"_id": {"$in": list(turn_ids)}})}
        missing = set(turn_ids) - found.keys()
        if missing:
            raise StoreError(f"turn {min(missing)!r} is missing from the database")
        return await self._unpack_all([found[turn_id] for turn_id in turn_ids])

    async def _unpack_all(self, documents: list[Document]) -> list[DispatchedSamplingTask]:
        blobs = await self._blobs.get(
            key for document in documents for key in _packed_keys(document)
        )
        return [unpack(document, blobs) for document in documents]


class ToolsPacker:
    """Packs the tools that turns show. They are large, and nearly always those of the last turn."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Document, ...], int] = ((), 0)
        self._packed: tuple[Any, list[Blob]] = (None, [])

    def pack(self, tools: tuple[Document, ...], limit: int) -> tuple[Any, list[Blob]]:
        """Return their stored form and the blobs that it refers to."""
        if not tools:
            return [], []
        if self._last != (tools, limit):
            blobs: list[Blob] = []
            self._packed = _pack("tools", encode(tools), limit, blobs), blobs
            self._last = copy.deepcopy(tools), limit
        return self._packed


def pack(turn: DispatchedSamplingTask, tools: ToolsPacker) -> tuple[Document, list[Blob]]:
    """Return the stored form of a turn and the blobs that it refers to.

    Where a value went into a blob, the document holds `{"blob": key}` and enough beside it for a
    person to recognise it.
    """
    document = to_document(turn.model_copy(update={"tools": ()}))
    limit = SHARED_BYTES if turn.parent is None else LARGE_BYTES
    document["tools"], shared = tools.pack(turn.tools, limit)
    blobs = list(shared)
    document["added_ids"] = _pack("added_ids", document["added_ids"], limit, blobs)
    for field in ("output_ids", "output_logprobs", "output_text", "routed_experts"):
        document[field] = _pack(field, document[field], LARGE_BYTES, blobs)
    for field, bound in (("added_messages", limit), ("tool_results", LARGE_BYTES)):
        document[field], more = _pack_values(field, document[field], bound)
        blobs.extend(more)
    return document, blobs


def unpack(document: Document, blobs: dict[str, Any]) -> DispatchedSamplingTask:
    """Return the turn that `pack` stored."""
    fields = dict(document)
    for name in filter(fields.__contains__, _WHOLE):
        fields[name] = _resolve(fields[name], blobs)
    for name in _LISTS:
        fields[name] = [_resolve(value, blobs) for value in fields[name]]
    for name in ("added_ids", "output_ids"):
        fields[name] = int32_array(fields[name])
    fields["output_logprobs"] = float32_array(fields["output_logprobs"])
    return from_document(DispatchedSamplingTask, fields)


def blob_keys(document: Document) -> Iterable[str]:
    """Yield the keys of all blobs that a stored turn refers to, images included."""
    yield from _packed_keys(document)
    addresses = [*document.get("added_images", ())]
    for result in document["tool_results"]:
        addresses += result.get("images", ())
    yield from filter(None, map(stored_key, addresses))


def _packed_keys(document: Document) -> Iterable[str]:
    for item in (
        *(document.get(name) for name in _WHOLE),
        *(item for name in _LISTS for item in document[name]),
    ):
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


def _fence_of(document: Document) -> int:
    return int(document["_id"].rsplit("/", 2)[1])


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
