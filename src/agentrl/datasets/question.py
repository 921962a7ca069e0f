"""Convert one decoded entry of a question file into a `Question`.

Entries use the field names of `MCPDataset`, their synonyms, or the names of TRL's and verl's datasets
(`with_own_names`). Values that the store cannot hold (`NaN` where pandas had no value, dates,
decimals) are converted.

Images are given as `images` or `image` (one or a list), or as `image_url` parts in the first user
message: http(s) or `data:` URLs, files below the question file's folder (`row_files`), or the `{"bytes": ..}` of Hugging
Face datasets. Files are read here, so samplers never open files named by questions.

Independent of file formats (see `entries`) and tasks (see `task_stream`).
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.config.sections import DataSection
from agentrl.datasets.entries import BadEntry
from agentrl.datasets.row_shapes import shape_of
from agentrl.runtime.row_files import open_row_file
from agentrl.schema.answer_form import TAG, asked_schema, is_answer_schema, is_asked
from agentrl.schema.image import (
    IMAGE_MARK,
    image_addresses,
    image_from_bytes,
    image_from_data_url,
)

ScorerCheck = Callable[[str, Sequence[Any]], None]
"""Raises ConfigError if this scorer cannot compare answers with these references."""

DEFAULT_SCORER = "exact"
"""Scorer of questions if neither they nor the flags name one."""
_QUERY_KEYS = (
    *("query", "question", "Question", "q", "query_prompt"),
    *("content", "instruction", "traj_question"),
)
_ANSWER_KEYS = (
    *("answer", "a", "Final answer", "Final Answer", "Final sample answer", "expected_answer"),
    *("ground_truth", "solution"),
)
_AUG_ANSWER_KEYS = ("aug_answers", "aug_answer")
_ID_KEYS = ("id", "task_id", "tid")
_TAG_KEYS = ("tags", "tag", "category")
_READ_KEYS = (
    *(*_QUERY_KEYS, *_ANSWER_KEYS, *_AUG_ANSWER_KEYS, *_ID_KEYS, *_TAG_KEYS),
    *("scorer", "answer_schema", "system_prompt", "images", "image", "messages", "raw"),
    *("prompt", "reward_model"),
)
_MAX_LISTED_KEYS = 8
_MAX_TEXT_CHARS = 3_000_000
"""Maximum text of one question; MongoDB documents are limited to 16 MB."""
_MAX_IMAGE_CHARS = 14 * 2**20
"""Maximum total size of the images in a task, as base64."""
_MAX_COLUMN_CHARS = 100_000
"""Longest own column, as JSON, that is carried with a question."""
_MAX_NESTING = 50
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
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The columns that are no field above, as JSON types."""
    read_as: str = ""
    """Name of the shape by which a row of a known data set was read (`row_shapes`)."""

    @property
    def other_request(self) -> str | None:
        """The schema that the texts ask for, if another one is looked for."""
        asked = asked_schema(f"{self.system_prompt}\n{self.query}")
        told = any(is_asked(self.answer_schema, one) for one in (self.query, self.system_prompt))
        return None if told or asked == self.answer_schema else asked


def question_of(entry: Any, defaults: DataSection, where: str, folder: Path | None) -> Question:
    """Return the question of an entry.

    Args:
        entry: the decoded entry.
        defaults: scorer, answer schema and system prompt of entries that name none.
        where: the entry's place in the file ("line 3"); becomes its id if it has none.
        folder: directory whose files the entry may name; None if it may name none.

    Raises:
        BadEntry: the question is missing, or a field is invalid.
    """
    if isinstance(entry, BadEntry):
        raise entry
    if not isinstance(entry, dict):
        raise BadEntry("expected a JSON object")
    columns = own_columns(entry)
    entry = with_own_names(entry)
    # A row that names its scorer is in the format of question files: the scorer may need its fields.
    is_own = defaults.row_format == "plain" or entry.get("scorer")
    shape = None if is_own else shape_of(entry)
    if shape is not None:
        entry |= shape.fields(entry, folder, has_scorer=bool(defaults.default_scorer))
    identity = _first(entry, _ID_KEYS)
    query, system_prompt = _query(entry), _system_prompt(entry, defaults)
    _check_chars(len(query) + len(system_prompt))  # before they are searched
    shape_scorer = None if shape is None else shape.reader.scorer
    question = Question(
        id=where.replace(" ", "") if identity is _MISSING else _text(identity, "id"),
        query=query,
        answer=_answer(entry),
        aug_answers=_aug_answers(entry),
        scorer=_text(
            entry.get("scorer") or defaults.default_scorer or shape_scorer or DEFAULT_SCORER,
            "scorer",
        ),
        answer_schema=_answer_schema(
            entry,
            defaults.default_answer_schema
            or asked_schema(f"{system_prompt}\n{query}")
            or (TAG if shape is None else shape.reader.answer_schema),
        ),
        system_prompt=system_prompt,
        tags=_tags(entry),
        images=_images(entry, folder),
        columns=columns,
        read_as="" if shape is None else shape.name,
    )
    _check_size(question)
    return question


def with_own_names(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry in which the names of TRL's and verl's datasets are those of question files.

    `prompt` becomes `query` or, if it is a conversation, `messages`; `reward_model.ground_truth`
    becomes `answer`, and `extra_info.task_id` becomes `id`. Names of question files take precedence.
    """
    prompt = entry.get("prompt")
    given = {
        "query" if isinstance(prompt, str) else "messages": prompt,
        "answer": _nested(entry, "reward_model", "ground_truth"),
        "id": _nested(entry, "extra_info", "task_id"),
    }
    renamed = {key: entry[key] for key in entry if key not in ("prompt", "reward_model")}
    for name, value in given.items():
        if value is not None and renamed.get(name) is None:
            renamed[name] = value
    return renamed


def _nested(entry: Mapping[str, Any], name: str, key: str) -> Any:
    inner = entry.get(name)
    return inner.get(key) if isinstance(inner, Mapping) else None


def own_columns(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that no field of a question holds; not those that no document can hold."""
    own = {}
    for name in left_out(entry, {}):
        try:
            value = _storable(entry[name])
        except BadEntry:  # bytes, or nested too deeply
            continue
        if len(json.dumps(value, ensure_ascii=False)) <= _MAX_COLUMN_CHARS:
            own[name] = value
    return own


def left_out(entry: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return the columns with a value that are neither a field nor among the own ones."""
    return [
        name
        for name, value in entry.items()
        if name not in _READ_KEYS and name not in own and _first(entry, (name,)) is not _MISSING
    ]


@lru_cache
def unread_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys that are no field, with the name that may have been intended."""
    absent = [name for name in _READ_KEYS if name not in keys]
    found = []
    for key in keys:
        if key not in _READ_KEYS:
            similar = get_close_matches(key.lower(), absent, n=1, cutoff=0.8)
            found.append(f"{key} (did you mean {similar[0]}?)" if similar else key)
    return tuple(found)


def _query(entry: Mapping[str, Any]) -> str:
    value = _first(entry, _QUERY_KEYS)
    if value is _MISSING:
        value = _first_content(entry, "user")
    if isinstance(value, list):
        parts = [part for part in value if isinstance(part, dict)]
        if any(part.get("type") == "text" for part in parts):
            value = _marked(parts)
    text = "" if value is None else _text(value, "query")
    if not text.strip():
        found = ", ".join(map(str, list(entry)[:_MAX_LISTED_KEYS])) or "nothing"
        raise BadEntry(
            f"no question in {', '.join(_QUERY_KEYS[:4])}, prompt or messages (found: {found})"
        )
    return text


def _marked(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the parts of a message as text, with marks of its images unless all of them come first."""
    text = "".join(
        _text(part.get("text"), "text part")
        if part.get("type") == "text"
        else IMAGE_MARK * (part.get("type") in ("image", "image_url"))
        for part in parts
    )
    return text.removeprefix(IMAGE_MARK * text.count(IMAGE_MARK))


def _system_prompt(entry: Mapping[str, Any], defaults: DataSection) -> str:
    given = entry.get("system_prompt") or _first_content(entry, "system")
    return _text(given or defaults.system_prompt or "", "system_prompt")


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
    """Return an answer in JSON types; dates and decimals become text."""
    if level > _MAX_NESTING:
        raise BadEntry(f"an answer is nested deeper than {_MAX_NESTING} levels")
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


def _answer_schema(entry: Mapping[str, Any], default: str) -> str:
    given = _text(entry.get("answer_schema") or default, "answer_schema")
    if not is_answer_schema(given):
        raise BadEntry(
            f"answer_schema {given!r}: expected `boxed`, a marker such as `####`, or the name of a tag"
        )
    return given


def _tags(entry: Mapping[str, Any]) -> tuple[str, ...]:
    value = _first(entry, _TAG_KEYS)
    if value is _MISSING or value == "":
        return ()
    return tuple(str(tag) for tag in value) if isinstance(value, list) else (str(value),)


def _first(entry: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the first existing value; 0, False and "" are values, null and NaN are not."""
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
        return str(int(value))  # pandas reads a column of integers with a gap as floats
    raise BadEntry(f"{what} must be text, found {_kind(value)}")


def _kind(value: object) -> str:
    return type(value).__name__


def _check_size(question: Question) -> None:
    answers = (question.answer, *question.aug_answers)
    texts = (question.id, question.query, question.system_prompt, *map(str, answers))
    _check_chars(sum(map(len, texts)))


def _check_chars(num_chars: int) -> None:
    if num_chars > _MAX_TEXT_CHARS:
        raise BadEntry(f"{num_chars:,} characters of text; the limit is {_MAX_TEXT_CHARS:,}")


def _first_content(entry: Mapping[str, Any], role: str) -> Any:
    """Return the content of a role's first message in `messages` or `raw.messages`, or None."""
    raw = entry.get("raw")
    nested = raw.get("messages") if isinstance(raw, dict) else None
    for messages in (entry.get("messages"), nested):
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.get("role") == role:
                return message.get("content")
    return None


def _images(entry: Mapping[str, Any], folder: Path | None) -> tuple[str, ...]:
    """Return the addresses of an entry's images: http(s) and `data:` URLs."""
    given = entry.get("images") or entry.get("image") or ()
    if isinstance(given, str | dict):
        given = (given,)
    content = _first_content(entry, "user")
    if not given and isinstance(content, list):
        given = image_addresses([{"content": content}])
    found = tuple(image_address(image, folder) for image in given)
    num_marks = _query(entry).count(IMAGE_MARK)
    if found and num_marks not in (0, len(found)):
        raise BadEntry(
            f"{num_marks} marks {IMAGE_MARK} in the question and {len(found)} images; write one for "
            "each image, or none"
        )
    if sum(map(len, found)) > _MAX_IMAGE_CHARS:
        raise BadEntry("its images exceed 10 MB in total; give URLs instead")
    return found


def image_address(image: object, folder: Path | None) -> str:
    """Return the http(s) or `data:` URL of an image: an address, a file of the folder, or bytes."""
    data = image.get("bytes") if isinstance(image, dict) else None
    if not isinstance(image, str) and not isinstance(data, bytes):
        raise BadEntry(f"an image must be a URL or a file, found {_kind(image)}")
    try:
        if isinstance(data, bytes):
            return image_from_bytes(data).data_url
        assert isinstance(image, str)
        if image.startswith(("http://", "https://")):
            return image
        if image.startswith("data:"):
            image_from_data_url(image)
            return image
        with open_row_file(folder, image) as opened:
            return image_from_bytes(opened.read(_MAX_IMAGE_CHARS)).data_url
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadEntry(f"image {str(image)[:80]!r}: {reason}") from None
