"""Files of an export: one per collection, written and read in batches, without loss.

JSONL files hold one document per line in MongoDB's relaxed Extended JSON (`mongoimport` reads them
too). Parquet files hold the same in the column `document`, and frequently used values in separate
columns: scores, lengths and times, and the complete token arrays as int32 and float32 lists.

Field names of the run's own that start with a `$`, such as a model's call of a database tool has
them, are written with another `$` in front: Extended JSON would take them for types.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from bson import Binary, Code, DBRef, Decimal128, ObjectId
from bson.errors import BSONError
from bson.json_util import RELAXED_JSON_OPTIONS, JSONOptions, dumps, loads

from agentrl.errors import ConfigError
from agentrl.store.documents.codec import Document
from agentrl.store.documents.packed_turns import blob_key

Format = Literal["jsonl", "parquet"]
Write = Callable[[list[Document], Mapping[str, Any]], None]
"""Appends a batch of documents to a file, given the blobs that their arrays were moved to."""

_JSON: JSONOptions = RELAXED_JSON_OPTIONS.with_options(tz_aware=True)
_MAX_LINE_CHARS = 128 * 2**20
"""Documents are limited to 16 MB of BSON, which can be several times as long in JSON."""
_MAX_DEPTH = 180
"""The server stores no deeper documents."""
_INT64 = 2**63
_SCHEMA_KEYWORDS = {
    *("$schema", "$id", "$ref", "$defs", "$comment", "$anchor", "$vocabulary"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
}
"""Fields of JSON schemas, which describe tools. Other names with a `$` are MongoDB's own."""
_DATA_TYPES = (str, int, float, bool, type(None), bytes, datetime, ObjectId, Decimal128)
ARRAYS = {
    name: np.dtype(kind)
    for name, kind in (("added_ids", "<i4"), ("output_ids", "<i4"), ("output_logprobs", "<f4"))
}
"""Binary fields of turns -> their element type, little endian."""
_TIME = "timestamp[ms, tz=UTC]"
_COLUMNS: dict[str, dict[str, tuple[str, str]]] = {
    "tasks": {
        "split": ("string", "split"),
        "query": ("string", "query"),
        "status": ("string", "status"),
        "num_generations": ("int64", "num_generations"),
    },
    "records": {
        "task_id": ("string", "task_id"),
        "split": ("string", "split"),
        "traj_id": ("int64", "traj_id"),
        "status": ("string", "status"),
        "outcome": ("string", "outcome"),
        "score": ("double", "score.value"),
        "scorer": ("string", "score.scorer"),
        "final_answer": ("string", "final_answer"),
        "attempt": ("int64", "attempt"),
        "num_turns": ("int64", "turns"),
        "num_tool_calls": ("int64", "num_tool_calls"),
        "num_prompt_tokens": ("int64", "num_prompt_tokens"),
        "num_output_tokens": ("int64", "num_output_tokens"),
        "min_version": ("int64", "min_version"),
        "max_version": ("int64", "max_version"),
        "started_at": (_TIME, "started_at"),
        "finished_at": (_TIME, "finished_at"),
        "error": ("string", "error"),
    },
    "turns": {
        "record_id": ("string", "record_id"),
        "attempt": ("int64", "attempt"),
        "index": ("int64", "index"),
        "parent": ("int64", "parent"),
        "shared_len": ("int64", "shared_len"),
        "num_tool_calls": ("int64", "tool_calls"),
        "finish_reason": ("string", "finish_reason"),
        "branch_reason": ("string", "branch_reason"),
        "started_at": (_TIME, "started_at"),
        "finished_at": (_TIME, "finished_at"),
    },
}
"""Collection -> column -> (type, path of the value in the document); a list counts as its length."""


def writer(format_: Format) -> Callable[[Path, str], AbstractContextManager[Write]]:
    """Return the function that opens a file for the documents of a collection.

    Raises:
        ConfigError: pyarrow is missing for Parquet; raised before anything is written.
    """
    if format_ == "parquet":
        _pyarrow("pyarrow")
        return _parquet_writer
    return _jsonl_writer


def read_documents(path: Path, format_: Format) -> Iterator[Document]:
    """Yield the documents of a file, whose contents are not trusted.

    Raises:
        ConfigError: the file holds something other than data of a run, or pyarrow is missing for
            Parquet.
    """
    number = 0
    try:
        for document in _read_parquet(path) if format_ == "parquet" else _read_jsonl(path):
            number += 1
            problem = _problem_of(document)
            if problem is not None:
                raise ConfigError(f"{path}: document {number}: {problem}")
            yield _without_marks(document)
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, BSONError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{path}: document {number + 1}: cannot be read: {reason}") from None


def _problem_of(document: object) -> str | None:
    """Return why a document cannot belong to a run (code, operators, references); None if it can."""
    if not isinstance(document, dict) or type(document.get("_id")) not in (str, int):
        return "a document must be an object with a text or integer _id"
    level: list[object] = [document]
    for _ in range(_MAX_DEPTH):
        for item in level:
            problem = _problem_of_value(item)
            if problem is not None:
                return problem
        level = [below for item in level for below in _values_of(item)]
        if not level:
            return None
    return f"it is nested deeper than {_MAX_DEPTH} levels"


def _problem_of_value(value: object) -> str | None:
    if isinstance(value, dict):
        return next((_problem_of_name(name) for name in value if _problem_of_name(name)), None)
    if isinstance(value, list):
        return None
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        return f"the integer {value} does not fit into 64 bits"
    if isinstance(value, Code) or not isinstance(value, _DATA_TYPES):
        return f"values of type {type(value).__name__} are not allowed"
    return None


def _problem_of_name(name: str) -> str | None:
    is_type = name.startswith("$") and not name.startswith("$$") and name not in _SCHEMA_KEYWORDS
    return f"the field name {name[:40]!r} is not allowed" if is_type or "\0" in name else None


def _values_of(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _with_marks(value: Any) -> Any:
    """Return a stored value with another `$` in front of field names that start with one."""
    if isinstance(value, DBRef):  # what the driver makes of an object with `$ref` and `$id`
        return {f"${name}": _with_marks(item) for name, item in value.as_doc().items()}
    if isinstance(value, dict):
        return {
            f"${name}" if name.startswith("$") and name not in _SCHEMA_KEYWORDS else name: (
                _with_marks(item)
            )
            for name, item in value.items()
        }
    return [_with_marks(item) for item in value] if isinstance(value, list) else value


def _without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name[1:] if name.startswith("$$") else name: _without_marks(item)
            for name, item in value.items()
        }
    return [_without_marks(item) for item in value] if isinstance(value, list) else value


@contextmanager
def _jsonl_writer(path: Path, _collection: str) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda batch, _: file.writelines(_line(document) + "\n" for document in batch)


def _line(document: Document) -> str:
    return dumps(_with_marks(document), json_options=_JSON)


def _read_jsonl(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        while line := file.readline(_MAX_LINE_CHARS + 1):
            if len(line) > _MAX_LINE_CHARS:
                raise ValueError(f"a line is longer than {_MAX_LINE_CHARS >> 20} Mi characters")
            yield loads(line, json_options=_JSON)


@contextmanager
def _parquet_writer(path: Path, collection: str) -> Iterator[Write]:
    arrow = _pyarrow("pyarrow")
    kind_of_document = collection.rpartition(".")[2]  # those of forks have a prefix
    arrays = ARRAYS if kind_of_document == "turns" else {}
    columns = _COLUMNS.get(kind_of_document, {})
    schema = arrow.schema(
        [
            arrow.field("id", arrow.string()),
            *(arrow.field(name, _arrow_type(arrow, kind)) for name, (kind, _) in columns.items()),
            *(
                arrow.field(name, arrow.list_(arrow.from_numpy_dtype(kind)))
                for name, kind in arrays.items()
            ),
            arrow.field("document", arrow.string()),
        ]
    )

    def write(batch: list[Document], blobs: Mapping[str, Any]) -> None:
        if not batch:
            return
        rows: dict[str, list[Any]] = {name: [] for name in schema.names}
        for document in batch:
            rest = dict(document)
            for name, kind in arrays.items():
                data = rest.get(name)
                if isinstance(data, bytes):
                    rest[name] = None  # the order of the fields is kept
                else:
                    data = blobs.get(blob_key(data) or "")
                rows[name].append(None if data is None else np.frombuffer(data, dtype=kind))
            for name, (_, path) in columns.items():
                rows[name].append(_value_at(document, path))
            rows["id"].append(str(document["_id"]))
            rows["document"].append(_line(rest))
        file.write_table(arrow.table(rows, schema=schema))

    with _pyarrow("pyarrow.parquet").ParquetWriter(path, schema, compression="zstd") as file:
        yield write


def _arrow_type(arrow: Any, name: str) -> Any:
    return arrow.timestamp("ms", tz="UTC") if name == _TIME else arrow.type_for_alias(name)


def _value_at(document: Document, path: str) -> Any:
    """Return the value at a dotted path (of a list, its length); None if it is missing."""
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return len(value) if isinstance(value, list) else value


def _read_parquet(path: Path) -> Iterator[Document]:
    with _pyarrow("pyarrow.parquet").ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            columns = {name: batch.column(name) for name in batch.schema.names}
            for number in range(batch.num_rows):
                document: Document = loads(columns["document"][number].as_py(), json_options=_JSON)
                for name, kind in ARRAYS.items():
                    cell = columns[name][number] if name in columns else None
                    # The document already refers to an array that is stored as a blob.
                    if cell is not None and cell.is_valid and document.get(name, 0) is None:
                        values = cell.values.to_numpy(zero_copy_only=False)
                        document[name] = Binary(values.astype(kind).tobytes())
                yield document


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError("Parquet needs pyarrow: pip install 'agentrl-mongo[parquet]'") from None
