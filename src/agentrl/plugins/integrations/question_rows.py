"""Converts datasets to question files in the run's folder, and their rows to other formats."""

import filecmp
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.atomic_file import atomic_file
from agentrl.config.sections import DataSection
from agentrl.datasets.entries import BadEntry, read_entries
from agentrl.datasets.question import with_own_names
from agentrl.datasets.question_files import QuestionFile
from agentrl.errors import DatasetError
from agentrl.plugins.integrations.agent_worker.references import described

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

SCORER = "reward_func"
"""Name of the scorer that calls the user's reward function."""
WHOLE_TEXT = "whole_text"
"""An answer schema that no text of a model matches, so that the whole text is the answer."""


def write_questions(dataset: Any, path: Path, argument: str) -> None:
    """Write a dataset as a question file (JSONL), and check it."""
    write_rows(dataset, path, argument, with_own_names)
    try:
        QuestionFile(path, DataSection()).close()
    except DatasetError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise DatasetError(f"{argument}: {reason}") from None


def write_rows(
    dataset: Any, path: Path, argument: str, converted: Callable[[Row], Mapping[str, Any]]
) -> None:
    """Write a dataset as JSONL."""
    with path.open("w", encoding="utf-8") as file:
        for where, row in _rows_of(dataset, argument):
            try:
                file.write(json.dumps(converted(row), ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                raise DatasetError(f"{argument}: {where}: not plain data ({error})") from None


def warn_of_equal_files(train: Path, test: Path) -> None:
    """Warn if the held-out data are the training data: their figures would hide overfitting."""
    if filecmp.cmp(train, test, shallow=False):
        log.warning(
            "train_dataset and test_dataset contain the same rows: test scores do not measure "
            "generalization to other questions"
        )


def read_questions(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a question file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def rewrite_questions(path: Path, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Replace every row of a question file."""
    with atomic_file(path) as staging, staging.open("w", encoding="utf-8") as file:
        for row in read_questions(path):
            file.write(json.dumps(change(row), ensure_ascii=False) + "\n")


def scored_by(scorer: str, form: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function that changes a row so that `scorer` scores it.

    A reward function in AWorld's format receives the whole text of the answer and all fields of the
    row except the question; a scorer receives the content of the answer's tag.
    """

    def change(row: Mapping[str, Any]) -> Mapping[str, Any]:
        if form == "aworld":
            inputs = reward_inputs(row)
            return {**row, "scorer": scorer, "answer": inputs, "answer_schema": WHOLE_TEXT}
        return {**row, "scorer": scorer}

    return change


def _rows_of(dataset: Any, argument: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a dataset with their positions (`line 3`, `row 3`)."""
    entries: Iterable[tuple[str, Any]]
    if isinstance(dataset, Mapping) or hasattr(dataset, "iterrows"):
        raise DatasetError(
            f"{argument}: {described(dataset)} is not a list of rows; pass one object per "
            "question, as in a DataFrame's to_dict('records') or one split of a DatasetDict"
        )
    if isinstance(dataset, str | Path):
        entries = _entries_of_file(Path(dataset), argument)
    elif hasattr(dataset, "__iter__") and hasattr(dataset, "__len__"):
        entries = ((f"row {number}", row) for number, row in enumerate(dataset, start=1))
    else:
        raise DatasetError(
            f"{argument}: {described(dataset)} is not a dataset; pass the path of a csv, "
            "json, jsonl or parquet file, a Dataset, or a list of rows"
        )
    for where, row in entries:
        if isinstance(row, BadEntry):
            raise DatasetError(f"{argument}: {where}: {row}")
        if not isinstance(row, Mapping):
            raise DatasetError(f"{argument}: {where}: expected an object with named fields")
        yield where, row


def reward_inputs(question: Row) -> dict[str, Any]:
    """Return the arguments of a reward function in AWorld's format, except the answer."""
    question_keys = (
        "query",
        "question",
        "answer",
        "scorer",
        "answer_schema",
        "system_prompt",
        "aug_answers",
        "messages",
    )
    extra = question.get("extra_info")
    return {
        "data_source": str(question.get("data_source") or ""),
        "ground_truth": question.get("answer"),
        "extra_info": dict(extra)
        if isinstance(extra, Mapping)
        else {key: question[key] for key in question if key not in (*question_keys, "data_source")},
    }


def verl_row(question: Row, number: int, split: str, agent_name: str) -> dict[str, Any]:
    """Return a question in the format that verl reads."""
    inputs = reward_inputs(question)
    query = question.get("query", question.get("question"))
    messages = list(question.get("messages") or [{"role": "user", "content": str(query)}])
    if question.get("system_prompt"):
        messages.insert(0, {"role": "system", "content": str(question["system_prompt"])})
    return {
        "prompt": messages,
        "data_source": inputs["data_source"] or "agentrl",
        "ability": str(question.get("ability") or "agent"),
        "reward_model": {
            "style": "rule",
            "ground_truth": "" if question.get("answer") is None else str(question["answer"]),
        },
        "extra_info": {**inputs["extra_info"], "index": number, "split": split},
        "agent_name": agent_name,
    }


def _entries_of_file(path: Path, argument: str) -> Iterator[tuple[str, Any]]:
    try:
        yield from read_entries(path)
    except DatasetError as error:
        raise DatasetError(f"{argument}: {error}") from None
