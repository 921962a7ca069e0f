"""The stored form of a turn, and the blobs that its large values move to.

A turn stores what it added to its parent. What the rollouts of a group share (tool schemas, system
prompts), and values that would bring a document near MongoDB's 16 MB limit, are stored as blobs:
the document then holds `{"blob": key}` and enough of the value for a person to recognize it. Pure
functions; `repositories.blobs` writes and reads the blobs.
"""

import copy
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import bson
from bson import Binary
from bson.codec_options import CodecOptions

from agentrl.schema import DispatchedSamplingTask
from agentrl.schema.image import stored_key
from agentrl.store.documents.codec import (
    Document,
    encode,
    from_document,
    to_document,
)

PART_BYTES = 8 * 2**20
"""Largest part of a blob that does not fit into one document."""
SHARED_BYTES = 256
"""A longer value of a root turn is stored as a blob, which the rollouts of the group share."""
LARGE_BYTES = 2**20
"""A longer value of any turn is stored as a blob, so that no document reaches 16 MB."""
PREVIEW_CHARS = 80
_BLOB = "blob"
WHOLE_FIELDS = (
    *("added_ids", "tools", "output_ids", "output_logprobs", "output_text"),
    *("routed_experts", "image_processor"),
)
"""Fields that move to a blob as a whole."""
LIST_FIELDS = ("added_messages", "tool_results")
"""Fields whose items move to blobs one by one."""
_CODEC: CodecOptions[Document] = CodecOptions(tz_aware=True)


class Blob:
    """One value to be stored.

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


def joined(parts: Sequence[bytes]) -> Any:
    """Return the value of a blob that was stored in parts."""
    return bson.decode(b"".join(parts), _CODEC)["value"]


class ToolsPacker:
    """Packs the tool schemas of turns, which are large and rarely change between turns."""

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

    If a value is stored as a blob, the document holds `{"blob": key}` and enough of the value for a
    person to recognize it.
    """
    document = to_document(turn.model_copy(update={"tools": ()}))
    limit = SHARED_BYTES if turn.parent is None else LARGE_BYTES
    document["tools"], shared = tools.pack(turn.tools, limit)
    blobs = list(shared)
    document["added_ids"] = _pack("added_ids", document["added_ids"], limit, blobs)
    for field in ("output_ids", "output_logprobs", "output_text", "routed_experts"):
        document[field] = _pack(field, document[field], LARGE_BYTES, blobs)
    # All turns of a run with images have the same image processor.
    processor = _pack("image_processor", document["image_processor"], SHARED_BYTES, blobs)
    document["image_processor"] = processor
    for field, bound in (("added_messages", limit), ("tool_results", LARGE_BYTES)):
        document[field], more = pack_values(field, document[field], bound)
        blobs.extend(more)
    return with_blob_keys(document), blobs


def with_blob_keys(document: Document) -> Document:
    """Return a stored turn with the keys of its blobs in a list, for the index of their users."""
    keys = sorted(set(blob_keys(document)))
    return {**document, "blobs": keys} if keys else document


def unpack(document: Document, blobs: dict[str, Any]) -> DispatchedSamplingTask:
    """Return the turn that `pack` stored."""
    fields = dict(document)
    for name in filter(fields.__contains__, WHOLE_FIELDS):
        fields[name] = _resolve(fields[name], blobs)
    for name in LIST_FIELDS:
        fields[name] = [_resolve(value, blobs) for value in fields[name]]
    return from_document(DispatchedSamplingTask, fields)


def blob_keys(document: Document) -> Iterable[str]:
    """Yield the keys of all blobs that a stored turn refers to, images and snapshots included."""
    yield from packed_keys(document)
    addresses = (*document.get("added_images", ()), document.get("snapshot", ""))
    yield from filter(None, map(stored_key, addresses))
    yield from image_keys(document["tool_results"])


def result_keys(packed: Iterable[Document]) -> set[str]:
    """Return the keys of all blobs that stored tool results refer to, images included."""
    results = list(packed)
    return {*filter(None, map(blob_key, results)), *image_keys(results)}


def image_keys(packed: Iterable[Document]) -> Iterable[str]:
    """Yield the keys of the images that stored tool results show."""
    for result in packed:
        yield from filter(None, map(stored_key, result.get("images", ())))


def packed_keys(document: Document) -> Iterable[str]:
    """Yield the keys of the blobs that values of a stored turn were moved to."""
    for item in (
        *(document.get(name) for name in WHOLE_FIELDS),
        *(item for name in LIST_FIELDS for item in document[name]),
    ):
        key = blob_key(item)
        if key is not None:
            yield key


def _pack(kind: str, value: Any, limit: int, blobs: list[Blob]) -> Any:
    if not value or (isinstance(value, str | bytes) and len(value) <= limit):
        return value
    blob = Blob(kind, value)
    if blob.num_bytes <= limit:
        return value
    blobs.append(blob)
    return {_BLOB: blob.key, **_preview(value)}


def pack_values(kind: str, values: list[Document], limit: int) -> tuple[list[Any], list[Blob]]:
    """Return the stored form of the items of a list, and the blobs that it refers to."""
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
        # The images of a result stay in sight: they are blobs of the turn, too.
        **{k: value[k] for k in ("role", "name", "images") if k in value},
    }


def blob_key(value: Any) -> str | None:
    """Return the key of the blob that a stored value was moved to; None for a value stored in place."""
    key = value.get(_BLOB) if isinstance(value, dict) else None
    return key if isinstance(key, str) else None


def _resolve(value: Any, blobs: dict[str, Any]) -> Any:
    key = blob_key(value)
    return value if key is None else blobs[key]
