"""Data sets of any form to rows, and rows of AWorld's form to our questions and back."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.datasets.entries import BadEntry, read_entries
from agentrl.errors import DatasetError

Row = Mapping[str, Any]

SCORER = "reward_func"
"""Scorer of questions for which a reward function was given."""
WHOLE_TEXT = "whole_text"
"""An answer schema that no model's text has, so that the whole text is the answer."""


def rows_of(dataset: Any, argument: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a data set, and where each stands (`line 3`, `row 3`).

    Args:
        dataset: the path of a csv, json, jsonl or parquet file, a Hugging Face `Dataset`, or any
            other sized iterable of mappings.
        argument: its name, for messages.

    Raises:
        DatasetError: it is missing, or a row of it is malformed.
    """
    entries: Iterable[tuple[str, Any]]
    if isinstance(dataset, str | Path):
        entries = _entries_of_file(Path(dataset), argument)
    elif hasattr(dataset, "__iter__") and hasattr(dataset, "__len__"):
        entries = ((f"row {number}", row) for number, row in enumerate(dataset, start=1))
    else:
        raise DatasetError(
            f"{argument}: a {type(dataset).__name__} is no data set; pass the path of a csv, json, "
            "jsonl or parquet file, a Dataset, or a list of rows"
        )
    for where, row in entries:
        if isinstance(row, BadEntry):
            raise DatasetError(f"{argument}: {where}: {row}")
        if not isinstance(row, Mapping):
            raise DatasetError(f"{argument}: {where}: expected an object with named fields")
        yield where, row


def question_of(row: Row) -> dict[str, Any]:
    """Return a row in the form of our question files.

    Rows of AWorld's form have `prompt` (messages) and `reward_model.ground_truth`; `data_source`
    and `extra_info` are kept beside the question. Other rows stay as they are.
    """
    question = {key: value for key, value in row.items() if key not in ("prompt", "reward_model")}
    prompt = row.get("prompt")
    if prompt is not None:
        question["query"] = _content(prompt, "user")
        if system := _content(prompt, "system"):
            question.setdefault("system_prompt", system)
    truth = row.get("reward_model")
    if isinstance(truth, Mapping) and "ground_truth" in truth:
        question["answer"] = truth["ground_truth"]
    extra = row.get("extra_info")
    if isinstance(extra, Mapping) and extra.get("task_id") is not None:
        question.setdefault("id", str(extra["task_id"]))
    return question


def reward_inputs(question: Row) -> dict[str, Any]:
    """Return what a reward function of AWorld's form is called with beside the answer."""
    known = (
        "query",
        "question",
        "answer",
        "scorer",
        "answer_schema",
        "system_prompt",
        "aug_answers",
    )
    extra = question.get("extra_info")
    return {
        "data_source": str(question.get("data_source") or ""),
        "ground_truth": question.get("answer"),
        "extra_info": dict(extra)
        if isinstance(extra, Mapping)
        else {key: question[key] for key in question if key not in (*known, "data_source")},
    }


def verl_row(question: Row, number: int, split: str, agent_name: str) -> dict[str, Any]:
    """Return a question in the form that verl reads.

    Args:
        question: what `question_of` returned.
        number: its position in the data set.
        split: `train` or `test`.
        agent_name: name of the agent loop.
    """
    inputs = reward_inputs(question)
    query = question.get("query", question.get("question"))
    messages = [{"role": "user", "content": str(query)}]
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


def _content(messages: Any, role: str) -> str:
    """Return the text of the first message of a role; a prompt may be bare text too."""
    if isinstance(messages, str):
        return messages if role == "user" else ""
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") == role:
            return str(message.get("content") or "")
    return ""
