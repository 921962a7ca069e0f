"""One entry of a question file to one question.

The field names of `MCPDataset` and its synonyms are accepted. What can stand in an entry and not in
a document (`NaN` where pandas had no value, dates, decimals) leaves here as something that can.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from agentrl.config.sections import DataSection
from agentrl.datasets.entries import BadEntry
from agentrl.datasets.entry_images import entry_images, first_user_content
from agentrl.schema.task import is_answer_schema

ScorerCheck = Callable[[str, bool], None]
"""Raises ConfigError unless this scorer can judge answers, given whether there is a reference."""

_QUERY_KEYS = (
    *("query", "question", "Question", "q", "query_prompt"),
    *("content", "instruction", "traj_question"),
)
_ANSWER_KEYS = (
    *("answer", "a", "Final answer", "Final Answer", "Final sample answer", "expected_answer"),
)
_AUG_ANSWER_KEYS = ("aug_answers", "aug_answer")
_ID_KEYS = ("id", "task_id", "tid")
_TAG_KEYS = ("tags", "tag", "category")
_NAMED_KEYS = 8
_MOST_CHARS = 3_000_000
"""Text of one question; a document holds 16 MB."""
_MOST_LEVELS = 50
_MISSING = object()


@dataclass(frozen=True)
class Question:
    """One entry of a question file."""

    id: str
    query: str
    answer: Any
    aug_answers: tuple[Any, ...]
    scorer: str
    answer_schema: str
    system_prompt: str
    tags: tuple[str, ...] = ()
    images: tuple[str, ...] = ()


def question_of(entry: Any, defaults: DataSection, where: str, folder: Path) -> Question:
    """Return the question that an entry asks.

    Args:
        entry: the decoded entry.
        defaults: scorer, answer schema and system prompt of entries that name none.
        where: where it stands; its id, if it has none.
        folder: where the names of its images start from.

    Raises:
        BadEntry: it asks nothing, or a field of it cannot be used.
    """
    if isinstance(entry, BadEntry):
        raise entry
    if not isinstance(entry, dict):
        raise BadEntry("expected a JSON object")
    identity = _first(entry, _ID_KEYS)
    question = Question(
        id=where.replace(" ", "") if identity is _MISSING else _text(identity, "id"),
        query=_query(entry),
        answer=_answer(entry),
        aug_answers=_aug_answers(entry),
        scorer=_text(entry.get("scorer") or defaults.default_scorer, "scorer"),
        answer_schema=_answer_schema(entry, defaults),
        system_prompt=_text(entry.get("system_prompt") or defaults.system_prompt or "", "prompt"),
        tags=_tags(entry),
        images=entry_images(entry, folder),
    )
    _check_size(question)
    return question


def _query(entry: Mapping[str, Any]) -> str:
    value = _first(entry, _QUERY_KEYS)
    if value is _MISSING:
        value = first_user_content(entry)
    if isinstance(value, list):
        parts = [part for part in value if isinstance(part, dict) and part.get("type") == "text"]
        value = "".join(_text(part.get("text"), "text part") for part in parts)
    text = "" if value is None else _text(value, "query")
    if not text.strip():
        found = ", ".join(map(str, list(entry)[:_NAMED_KEYS])) or "nothing"
        raise BadEntry(
            f"no question: none of {', '.join(_QUERY_KEYS[:4])}, messages has one (it has {found})"
        )
    return text


def _answer(entry: Mapping[str, Any]) -> Any:
    value = _first(entry, _ANSWER_KEYS)
    raw = entry.get("raw")
    if value is _MISSING and isinstance(raw, dict):
        value = _first(raw, ("expected_answer", "answer"))
    return None if value is _MISSING else _storable(value)


def _aug_answers(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    value = _first(entry, _AUG_ANSWER_KEYS)
    if value is _MISSING:
        return ()
    return tuple(map(_storable, value)) if isinstance(value, list) else (_storable(value),)


def _storable(value: Any, level: int = 0) -> Any:
    """Return an answer in the types of JSON; dates and decimals as they are written."""
    if level > _MOST_LEVELS:
        raise BadEntry(f"an answer is nested deeper than {_MOST_LEVELS} levels")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_storable(item, level + 1) for item in value]
    if isinstance(value, dict):
        return {str(key): _storable(item, level + 1) for key, item in value.items()}
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise BadEntry(f"an answer must be text, a number, or a list of them, found {_kind(value)}")


def _answer_schema(entry: Mapping[str, Any], defaults: DataSection) -> str:
    given = _text(entry.get("answer_schema") or defaults.default_answer_schema, "answer_schema")
    if not is_answer_schema(given):
        raise BadEntry(f"answer_schema {given!r}: expected `boxed` or the name of a tag")
    return given


def _tags(entry: Mapping[str, Any]) -> tuple[str, ...]:
    value = _first(entry, _TAG_KEYS)
    if value is _MISSING or value == "":
        return ()
    return tuple(str(tag) for tag in value) if isinstance(value, list) else (str(value),)


def _first(entry: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the first value that is there; 0, False and "" are values, null and NaN are not."""
    for key in keys:
        value = entry.get(key)
        if value is not None and not (isinstance(value, float) and math.isnan(value)):
            return value
    return _MISSING


def _text(value: Any, what: str) -> str:
    if isinstance(value, str):
        return value
    if what == "id" and isinstance(value, int):
        return str(value)
    if what == "id" and isinstance(value, float) and value.is_integer():
        return str(int(value))  # a column of integers with a gap in it
    raise BadEntry(f"{what} must be text, found {_kind(value)}")


def _kind(value: object) -> str:
    return type(value).__name__


def _check_size(question: Question) -> None:
    answers = (question.answer, *question.aug_answers)
    texts = (question.id, question.query, question.system_prompt, *map(str, answers))
    num_chars = sum(map(len, texts))
    if num_chars > _MOST_CHARS:
        raise BadEntry(f"{num_chars:,} characters of text; at most {_MOST_CHARS:,} can be stored")
