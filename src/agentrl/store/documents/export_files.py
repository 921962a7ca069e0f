"""Files of an export: one per collection, written and read in batches, without loss.

JSONL files hold one document per line in MongoDB's relaxed Extended JSON (`mongoimport` reads them
too).

Field names of the run's own that start with a `$`, such as a model's call of a database tool has
them, are written with another `$` in front: Extended JSON would take them for types.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from bson import Code, DBRef, Decimal128, ObjectId
from bson.errors import BSONError
from bson.json_util import RELAXED_JSON_OPTIONS, JSONOptions, dumps, loads

from agentrl.errors import ConfigError
from agentrl.store.documents.codec import Document

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


def write_documents(file: TextIO, batch: Iterable[Document]) -> None:
    """Append documents to a file."""
    file.writelines(dumps(_with_marks(one), json_options=_JSON) + "\n" for one in batch)


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a file, whose contents are not trusted."""
    number = 0
    try:
        for document in _read_lines(path):
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


def _read_lines(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        while line := file.readline(_MAX_LINE_CHARS + 1):
            if len(line) > _MAX_LINE_CHARS:
                raise ValueError(f"a line is longer than {_MAX_LINE_CHARS >> 20} Mi characters")
            yield loads(line, json_options=_JSON)
