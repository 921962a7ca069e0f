"""Documents to BSON that a person can read, and back.

Text stays text. Token ids and logprobs become Binary (subtype 0): int32 and float32, little endian.
What JSON allows and BSON does not (integers beyond 64 bits, lone surrogates, NUL in keys) can reach
us in a model's tool calls; it is stored as text, because a rollout must not fail on it.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

import numpy as np
from bson import Binary
from pydantic import BaseModel, ValidationError

from agentrl.errors import StoreError
from agentrl.schema import (
    TASK_TYPES,
    DBRecordData,
    Policy,
    Record,
    Run,
    Task,
)

Document = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)

_INT64 = 2**63
_UNENCODED_TYPES = frozenset({type(None), bool, float, datetime})
ARRAY_TYPES = {"i": "<i4", "f": "<f4"}
"""NumPy kind -> stored element type: little endian on every machine."""
_TASK_POSITION_FIELDS = frozenset(
    {"_id", "split", "epoch", "order", "num_generations", "status", "tag"}
    | {"rounds", "created_at", "completed_at", "group_scores"}
)
"""Fields of a Task that describe its position in the run, not its question."""
NOT_STORED: dict[type[BaseModel], set[str]] = {DBRecordData: {"turns"}}
"""Fields that are filled in on reading: turns are stored once, in their own collection."""
_ID_FIELDS: dict[type[BaseModel], str] = {Run: "name", DBRecordData: "record_id", Policy: "version"}


def encode(value: Any) -> Any:
    """Return `value` in a form that BSON stores without loss of meaning (see the module docstring)."""
    if type(value) in _UNENCODED_TYPES:
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, dict):
        return {_encoded_key(str(key)): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, np.ndarray):
        return Binary(value.astype(ARRAY_TYPES[value.dtype.kind]).tobytes())
    return value


@functools.lru_cache(maxsize=4096)  # nearly all keys are field names
def _encoded_key(key: str) -> str:
    encoded: str = encode(key)
    return encoded.replace("\0", "\\0")


def to_document(value: BaseModel) -> Document:
    """Return the stored form of a schema value; its id becomes `_id`, a Task's kind is kept."""
    own_id = id_field(type(value))
    fields = value.model_dump(exclude=NOT_STORED.get(type(value)))
    stored: Document = {"_id": encode(fields.pop(own_id))}
    if isinstance(value, Task):
        stored["kind"] = value.kind
    # Field names and most values need no encoding, which would be slow for millions of questions.
    for name, item in fields.items():
        stored[name] = item if type(item) in _UNENCODED_TYPES else encode(item)
    return stored


def from_document(cls: type[Model], document: Mapping[str, Any]) -> Model:
    """Return the schema value of a stored document."""
    fields = dict(document)
    fields[id_field(cls)] = fields.pop("_id")
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StoreError(
            f"document {document['_id']!r} is not a valid {cls.__name__}: {where}: {first['msg']}"
        ) from error


def task_from_document(document: Mapping[str, Any]) -> Task:
    """Return a Task of the class registered for the document's kind."""
    kind = document.get("kind", Task.kind)
    if kind not in TASK_TYPES:
        raise StoreError(
            f"task {document['_id']!r} is of kind {kind!r}, which is not registered in this "
            "process; import the module that registers it with register_task_type"
        )
    return from_document(TASK_TYPES[kind], document)


def require(document: Any, what: str) -> Document:
    """Return `document`, the result of a query, unless it is None."""
    if document is None:
        raise StoreError(f"{what} does not exist")
    found: Document = document
    return found


def without_none(**conditions: Any) -> Document:
    """Return a filter of the conditions that are not None."""
    return {field: value for field, value in conditions.items() if value is not None}


def task_version(document: Mapping[str, Any]) -> str:
    """Return a short hash of a stored Task's content: what was asked and how it is scored."""
    content = {name: value for name, value in document.items() if name not in _TASK_POSITION_FIELDS}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_to_document(record: Record) -> Document:
    """Return the stored form of a Record.

    The version range is left out while it is unknown: `$min` would keep a stored null forever.
    """
    document = to_document(record)
    for field in ("min_version", "max_version"):
        if document[field] is None:
            del document[field]
    return document


def record_data(record: Record, task_version: str) -> DBRecordData:
    """Return the trainer's view of an ended Record, without its turns."""
    return DBRecordData(
        record_id=record.id,
        task_id=record.task_id,
        traj_id=record.traj_id,
        split=record.split,
        order=record.order,
        attempt=record.attempt,
        branch=record.branch,
        round=record.round,
        outcome=record.outcome,
        score=record.score,
        more_scores=record.more_scores,
        turn_ids=record.turns,
        num_tokens=record.num_prompt_tokens + record.num_output_tokens,
        min_version=record.min_version,
        max_version=record.max_version,
        task_version=task_version,
    )


def id_field(cls: type[BaseModel]) -> str:
    """Return the field that is stored as `_id`."""
    return _ID_FIELDS.get(cls, "id")
