"""The data arguments to question files in the run's folder."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.sections import DataSection
from agentrl.datasets.question_files import QuestionFile
from agentrl.errors import DatasetError
from agentrl.integrations.dataset_rows import WHOLE_TEXT, question_of, reward_inputs, rows_of


def write_questions(dataset: Any, path: Path, argument: str) -> None:
    """Write a data set as a question file (JSONL), and check it.

    Raises:
        DatasetError: it is missing, malformed or empty; the message names the argument.
    """
    with path.open("w", encoding="utf-8") as file:
        for where, row in rows_of(dataset, argument):
            try:
                file.write(json.dumps(question_of(row), ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                raise DatasetError(f"{argument}: {where}: not plain data ({error})") from None
    try:
        QuestionFile(path, DataSection()).close()
    except DatasetError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise DatasetError(f"{argument}: {reason}") from None


def read_questions(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a question file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def rewrite_questions(path: Path, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Replace every row of a question file."""
    beside = path.with_suffix(".new")
    with beside.open("w", encoding="utf-8") as file:
        for row in read_questions(path):
            file.write(json.dumps(change(row), ensure_ascii=False) + "\n")
    beside.replace(path)


def scored_by(scorer: str, form: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return the change of a row after which `scorer` scores it.

    A function of AWorld's form gets the whole text of the answer, and everything that the row says
    beside the question; a scorer gets what stands in the answer's tag.
    """

    def change(row: Mapping[str, Any]) -> Mapping[str, Any]:
        if form == "aworld":
            inputs = reward_inputs(row)
            return {**row, "scorer": scorer, "answer": inputs, "answer_schema": WHOLE_TEXT}
        return {**row, "scorer": scorer}

    return change
