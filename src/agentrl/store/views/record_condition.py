"""Conditions on records as text: `score.detail ~ "timeout" and score < 0.5`.

A condition is one comparison, or several with `and` between them: a field, an operator (=, !=, <, <=, >,
>=, or ~ for a part of a text, in upper or lower case) and a value, one word or in double quotes. The
value `none` is that of a field without one. Times are those of ISO 8601, in UTC by default.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from agentrl.errors import ConfigError
from agentrl.store.documents.codec import Document, encode

_OTHER_PATHS = {"record": "_id", "task": "task_id", "tool": "tool_names", "score": "score.value"}
_TEXTS = ("record", "task", "tool", "outcome", "final_answer", "error")
_NUMBERS = ("score", "num_tool_calls", "num_output_tokens", "min_version", "max_version", "traj_id")
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[str], Any]]] = {
    "text": ((*_TEXTS, "score.scorer", "score.version", "score.detail"), ("=", "!=", "~"), encode),
    "number": (_NUMBERS, ("=", "!=", "<", "<=", ">", ">="), float),
    "time": (("finished_at", "score.scored_at"), ("<", "<=", ">", ">="), datetime.fromisoformat),
}
"""Kind of a field -> the fields, their operators, and how a value is read."""
_OPERATORS = {"=": "$eq", "!=": "$ne", "<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte"}
_COMPARISON = re.compile(
    r"\s*([\w.]+)\s*(>=|<=|!=|=|>|<|~)\s*"
    r'("(?:[^"\\]|\\["\\])*"|[^\s"]+)(?:\s+and\s+(?=\S)|\s*$)'
)


def record_condition(text: str) -> Document:
    """Return MongoDB's filter for a condition on records.

    Raises:
        ConfigError: the condition cannot be read, or names no field of records.
    """
    parts: list[Document] = []
    end = 0
    while end < len(text) or not parts:
        found = _COMPARISON.match(text, end)
        if found is None:
            raise ConfigError(
                f"{text!r} is not a condition on records; write FIELD OPERATOR VALUE, such as "
                "'score.detail ~ \"timeout\" and score < 0.5'"
            )
        parts.append(_comparison(*found.groups()))
        end = found.end()
    return {"$and": parts}


def _comparison(field: str, operator: str, value: str) -> Document:
    kind = next((name for name, (fields, _, _) in _KINDS.items() if field in fields), None)
    if kind is None:
        known = ", ".join(name for fields, _, _ in _KINDS.values() for name in fields)
        raise ConfigError(f"records have no field {field!r}; a condition names one of {known}")
    _, operators, read = _KINDS[kind]
    if operator not in operators:
        raise ConfigError(f"{field} is a {kind}; compare it with {', '.join(operators)}")
    path, text = _OTHER_PATHS.get(field, field), value
    if value.startswith('"'):
        text = json.loads(value)
    elif value == "none" and operator in ("=", "!="):
        return {path: {_OPERATORS[operator]: None}}
    if operator == "~":
        return {path: {"$regex": re.escape(read(text)), "$options": "i"}}
    try:
        return {path: {_OPERATORS[operator]: read(text)}}
    except ValueError:
        raise ConfigError(f"{field} is a {kind}, and {text!r} is none") from None
