"""Question files (JSONL, or a JSON list) to tasks.

The field names of `MCPDataset` and its synonyms are accepted. A file with a bad line is refused as
a whole, before anything is sampled, with the numbers of its bad lines.
"""

import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.sections import DataSection
from agentrl.errors import DatasetError
from agentrl.schema import MCPTask, Split

_QUERY_KEYS = (
    *("query", "question", "Question", "q", "query_prompt"),
    *("content", "instruction", "traj_question"),
)
_ANSWER_KEYS = (
    *("answer", "a", "Final answer", "Final Answer", "Final sample answer", "expected_answer"),
)
_AUG_ANSWER_KEYS = ("aug_answers", "aug_answer")
_ID_KEYS = ("id", "task_id", "tid")
_NAMED_PROBLEMS = 3
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


def load_questions(
    path: Path, defaults: DataSection, known_scorers: Collection[str] | None = None
) -> list[Question]:
    """Read a question file.

    Args:
        path: JSONL with one object a line, or a JSON list of objects.
        defaults: scorer, answer schema and system prompt of entries that name none.
        known_scorers: names that may stand in `scorer`; None accepts all.

    Raises:
        DatasetError: the file is missing or empty, or entries of it are malformed, name an unknown
            scorer or repeat an id; the first few are named by line (or position in the list).
    """
    questions: list[Question] = []
    problems: list[str] = []
    seen: dict[str, str] = {}
    for where, entry in _entries(path):
        try:
            question = _question(entry, defaults, where)
            if known_scorers is not None and question.scorer not in known_scorers:
                known = ", ".join(sorted(known_scorers))
                raise _BadEntry(f"unknown scorer {question.scorer!r} (known: {known})")
            if question.id in seen:
                raise _BadEntry(f"id {question.id!r} was used before, in {seen[question.id]}")
        except _BadEntry as problem:
            problems.append(f"{where}: {problem}")
            continue
        seen[question.id] = where
        questions.append(question)
    if problems:
        named = "; ".join(problems[:_NAMED_PROBLEMS])
        more = len(problems) - _NAMED_PROBLEMS
        raise DatasetError(f"{path}: {named}" + (f" (and {more} more)" if more > 0 else ""))
    if not questions:
        raise DatasetError(f"{path}: holds no questions")
    return questions


def tasks_from_questions(
    questions: Sequence[Question],
    split: Split,
    *,
    epochs: Iterable[int] = (0,),
    num_generations: int = 1,
    first_order: int = 0,
    shuffle_seed: int | None = None,
    tag: str = "",
) -> Iterator[MCPTask]:
    """Yield the tasks of some epochs, with ids `{split}/{epoch}/{question id}`.

    Args:
        questions: what `load_questions` returned.
        split: split of the tasks.
        epochs: numbers of the epochs; every question is asked once in each.
        num_generations: tries a question.
        first_order: `order` of the first task; the others follow without gaps.
        shuffle_seed: draw each epoch's order with this seed; None keeps the file's order.
        tag: label under which reports group the tasks.
    """
    order = first_order
    for epoch in epochs:
        asked = list(questions)
        if shuffle_seed is not None:
            random.Random(f"{shuffle_seed}/{epoch}").shuffle(asked)
        for question in asked:
            yield MCPTask(
                id=f"{split}/{epoch}/{question.id}",
                split=split,
                epoch=epoch,
                order=order,
                num_generations=num_generations,
                tag=tag,
                query=question.query,
                system_prompt=question.system_prompt,
                answer=question.answer,
                aug_answers=question.aug_answers,
                scorer=question.scorer,
                answer_schema=question.answer_schema,
                dataset_id=question.id,
            )
            order += 1


def train_tasks(
    config: DataSection, seed: int, known_scorers: Collection[str] | None = None
) -> Iterator[MCPTask]:
    """Yield all training tasks of a run, in their order over all epochs; nothing without a file.

    Raises:
        DatasetError: see `load_questions`.
    """
    if config.train_file is None:
        return iter(())
    return tasks_from_questions(
        load_questions(config.train_file, config, known_scorers),
        "train",
        epochs=range(config.num_train_epochs),
        num_generations=config.num_generations,
        shuffle_seed=seed if config.shuffle else None,
    )


def eval_tasks(
    config: DataSection, version: int, known_scorers: Collection[str] | None = None
) -> list[MCPTask]:
    """Return the tasks of an evaluation of policy `version`; their orders overtake training's.

    They are tagged `eval@{version}`, and the version stands in their ids as the epoch.

    Raises:
        DatasetError: see `load_questions`.
    """
    if config.eval_file is None:
        return []
    questions = load_questions(config.eval_file, config, known_scorers)
    return list(
        tasks_from_questions(
            questions,
            "eval",
            epochs=(version,),
            num_generations=config.eval_num_generations,
            first_order=-len(questions),
            tag=f"eval@{version}",
        )
    )


class _BadEntry(Exception):
    """Says what is wrong with one entry."""


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where, decoded entry); an undecodable line is yielded as its `_BadEntry`."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = file.read(1)
            while first.isspace():
                first = file.read(1)
            file.seek(0)
            if first == "[":
                yield from _list_entries(path, file.read())
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"line {number}", _decoded(line)
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: not UTF-8 text ({error.reason})") from None


def _decoded(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return _BadEntry(f"not valid JSON: {error.msg} (column {error.colno})")


def _list_entries(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(
            f"{path}: line {error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
        ) from None
    for number, entry in enumerate(entries, start=1):
        yield f"entry {number}", entry


def _question(entry: Any, defaults: DataSection, where: str) -> Question:
    if isinstance(entry, _BadEntry):
        raise entry
    if not isinstance(entry, dict):
        raise _BadEntry("expected a JSON object")
    query = _query(entry)
    if query is None:
        raise _BadEntry(f"no question: none of {', '.join(_QUERY_KEYS[:4])}, messages is there")
    identity = _first(entry, _ID_KEYS)
    return Question(
        id=where.replace(" ", "") if identity is _MISSING else _text(identity, "id"),
        query=query,
        answer=_answer(entry),
        aug_answers=_aug_answers(entry),
        scorer=_text(entry.get("scorer") or defaults.default_scorer, "scorer"),
        answer_schema=_text(
            entry.get("answer_schema") or defaults.default_answer_schema, "answer_schema"
        ),
        system_prompt=_text(entry.get("system_prompt") or defaults.system_prompt or "", "prompt"),
    )


def _query(entry: Mapping[str, Any]) -> str | None:
    value = _first(entry, _QUERY_KEYS)
    if value is not _MISSING:
        return _text(value, "query") or None
    raw = entry.get("raw")
    nested = raw.get("messages") if isinstance(raw, dict) else None
    for messages in (entry.get("messages"), nested):
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.get("role") == "user":
                return _text(message.get("content"), "user message") or None
    return None


def _answer(entry: Mapping[str, Any]) -> Any:
    value = _first(entry, _ANSWER_KEYS)
    raw = entry.get("raw")
    if value is _MISSING and isinstance(raw, dict):
        value = _first(raw, ("expected_answer", "answer"))
    return None if value is _MISSING else value


def _aug_answers(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    value = _first(entry, _AUG_ANSWER_KEYS)
    if value is _MISSING:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _first(entry: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the first value that is there; 0, False and "" are values, null is not."""
    for key in keys:
        if entry.get(key) is not None:
            return entry[key]
    return _MISSING


def _text(value: Any, what: str) -> str:
    if isinstance(value, str):
        return value
    if what == "id" and isinstance(value, int):
        return str(value)
    raise _BadEntry(f"{what} must be text, found {type(value).__name__}")
