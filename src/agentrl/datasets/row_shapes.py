"""Rows of known data sets, as they stand on the hub, into the fields of question files.

A `RowShape` recognizes rows by their columns and values, never by the name of a file, so that every row
is read in the same way wherever it lies; the first shape of `SHAPES` that fits decides. It states
only what differs from a plain row. `docs/datasets.md` lists them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.datasets import code_rows
from agentrl.datasets.entries import BadEntry
from agentrl.datasets.row_fields import (
    attached,
    boxed_reference,
    browsecomp,
    choices,
    first_of,
    function_calls,
    gsm8k_reference,
    incorrect_choices,
    listed_aliases,
    math_reference,
    target_reference,
    text_of,
)
from agentrl.schema.answer_form import BOXED, FENCE, TAG

Row = Mapping[str, Any]
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class RowShape:
    """How the rows of some data sets are recognized and read."""

    name: str
    """The data sets, as the start of a run names them."""
    explanation: str
    """What the reference is, for the user; or what to do with rows that cannot be read."""
    columns: frozenset[str]
    """The columns that a row has."""
    fields: Callable[[Row, Path | None], Fields]
    """Returns the fields that differ from those of a plain row.

    Args: the row, and the directory of its file. Raises BadEntry: it cannot be used.
    """
    scorer: str = ""
    answer_schema: str = TAG
    """Schema if the text asks for none."""
    holds: Callable[[Row], bool] = lambda row: True
    """A condition on the row's values."""

    runs_code: bool = False
    """Whether a scorer has to run the model's program, which none does unless the user chose it."""

    def fits(self, row: Row) -> bool:
        """Return whether this shape reads a row."""
        return self.columns <= row.keys() and self.holds(row)


def shape_of(row: Row) -> RowShape | None:
    """Return the shape of a row, or None for a plain row, whose fields are taken as they are."""
    return next((shape for shape in SHAPES if shape.fits(row)), None)


def explanation_of(name: str) -> str:
    """Return the explanation of the shape with this name, or "" if there is none."""
    return next((shape.explanation for shape in SHAPES if shape.name == name), "")


def _columns(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _is_text(name: str) -> Callable[[Row], bool]:
    return lambda row: isinstance(row[name], str) and bool(row[name].strip())


def _is_list(name: str) -> Callable[[Row], bool]:
    return lambda row: isinstance(row[name], list) and bool(row[name])


def _refused(advice: str) -> Callable[[Row, Path | None], Fields]:
    def refuse(row: Row, folder: Path | None) -> Fields:
        raise BadEntry(advice)

    return refuse


def _code(
    name: str,
    columns: str,
    fields: Callable[[Row, Path | None], Fields],
    holds: Callable[[Row], bool] = lambda row: True,
) -> RowShape:
    return RowShape(
        name,
        "the reference holds the unit tests; your scorer runs them (--scorer_module, "
        "--default_scorer)",
        _columns(columns),
        fields,
        answer_schema=FENCE,
        holds=holds,
        runs_code=True,
    )


def _math(reference: Callable[[Row], str]) -> Callable[[Row, Path | None], Fields]:
    def fields(row: Row, folder: Path | None) -> Fields:
        query = first_of(row, "problem", "Problem", "query", "question")
        return {
            "query": query,
            "answer": reference(row),
            "id": first_of(row, "id", "ID", "unique_id"),
        }

    return fields


def _judged_text(*query: str) -> Callable[[Row, Path | None], Fields]:
    return lambda row, folder: {"query": first_of(row, *query)}


SHAPES: tuple[RowShape, ...] = (
    RowShape(
        "SWE-bench, SWE-Gym",
        "its reward needs the repository and its tests; convert the tasks to Harbor's format and give "
        "--env harbor:FOLDER (docs/environments.md)",
        _columns("repo base_commit problem_statement"),
        _refused(
            "a row of SWE-bench or SWE-Gym: its reward needs the repository and its tests; convert "
            "the tasks to Harbor's format and give --env harbor:FOLDER"
        ),
    ),
    RowShape(
        "ToolACE",
        "conversations to imitate, without a question and reference: learn from them with "
        "`agentrl sft`",
        _columns("conversations"),
        _refused(
            "a conversation to imitate, as in ToolACE, without a question and a reference: learn from "
            "it with `agentrl sft --train_file`"
        ),
        holds=lambda row: not {"query", "question", "problem", "answer"} & row.keys(),
    ),
    _code("MBPP", "test_list code", code_rows.mbpp),
    _code("HumanEval", "query test entry_point canonical_solution", code_rows.human_eval),
    _code("APPS, TACO", "question input_output", code_rows.input_output),
    _code("CodeContests", "description public_tests", code_rows.code_contests),
    _code("LiveCodeBench", "question_content public_test_cases", code_rows.live_code_bench),
    _code(
        "Eurus-2-RL (code)",
        "messages answer data_source ability",
        code_rows.ground_truth,
        lambda row: str(row["ability"]).lower() in ("code", "coding"),
    ),
    RowShape(
        "GSM8K",
        "the reference is what follows the last ####",
        _columns("question answer"),
        lambda row, folder: {"answer": gsm8k_reference(row["answer"])},
        scorer="math",
        answer_schema=BOXED,
        holds=lambda row: gsm8k_reference(row["answer"]) is not None,
    ),
    RowShape(
        "GAIA",
        "the reference is `Final answer`; attachments are shown (images) or added (text)",
        frozenset({"Question", "Final answer"}),
        attached,
        scorer="gaia",
    ),
    RowShape(
        "HLE, exact match",
        "the reference is `answer`",
        _columns("question answer answer_type rationale"),
        lambda row, folder: {"images": row.get("image") or None},
        scorer="em",
        holds=lambda row: row["answer_type"] == "exactMatch",
    ),
    RowShape(
        "HLE, multiple choice",
        "the reference is the letter in `answer`; the question holds its choices",
        _columns("question answer answer_type rationale"),
        lambda row, folder: {"images": row.get("image") or None},
        scorer="choice",
        holds=lambda row: row["answer_type"] == "multipleChoice",
    ),
    RowShape(
        "BrowseComp",
        "question and reference are decrypted with `canary`",
        _columns("problem answer canary"),
        lambda row, folder: browsecomp(row),
        scorer="em",
    ),
    RowShape(
        "SimpleQA",
        "the question is `problem`, the reference `answer`",
        _columns("problem answer metadata"),
        _judged_text("problem"),
        scorer="em",
    ),
    RowShape(
        "GPQA",
        "the choices are written into the question in an order drawn from its text; the reference "
        "is a letter",
        frozenset({"Question", "Correct Answer", "Incorrect Answer 1"}),
        lambda row, folder: incorrect_choices(row),
        scorer="choice",
    ),
    RowShape(
        "MMLU",
        "the choices are written into the question; the index in `answer` becomes a letter",
        _columns("question choices answer"),
        lambda row, folder: choices(row, "question", "choices", "answer"),
        scorer="choice",
    ),
    RowShape(
        "MMLU-Pro",
        "the choices in `options` are written into the question; the reference is a letter",
        _columns("question options answer"),
        lambda row, folder: choices(row, "question", "options", "answer"),
        scorer="choice",
    ),
    RowShape(
        "ARC, CommonsenseQA",
        "the choices are written into the question; the label in `answerKey` becomes a letter",
        _columns("question choices answerKey"),
        lambda row, folder: choices(row, "question", "choices", "answerKey"),
        scorer="choice",
    ),
    RowShape(
        "xLAM function calling",
        "the tools are written into the question; the reference is the list of calls in `answers`",
        _columns("query tools answers"),
        lambda row, folder: function_calls(row, "query", "tools", "answers"),
        scorer="calls",
    ),
    RowShape(
        "BFCL",
        "the functions are written into the question; the reference is `ground_truth`",
        _columns("question function"),
        lambda row, folder: function_calls(row, "question", "function", "ground_truth"),
        scorer="calls",
    ),
    RowShape(
        "MuSiQue",
        "`answer_aliases` count as right; the paragraphs are not shown (give the model a search tool)",
        _columns("question answer answer_aliases"),
        lambda row, folder: listed_aliases(row, "answer_aliases", "answer"),
        scorer="em",
    ),
    RowShape(
        "HotpotQA, 2WikiMultihopQA",
        "the reference is `answer`; the paragraphs are not shown (give the model a search tool)",
        _columns("question answer supporting_facts context"),
        lambda row, folder: {"id": first_of(row, "id", "_id")},
        scorer="em",
    ),
    RowShape(
        "TriviaQA",
        "the reference is `answer.value`; its aliases count as right",
        _columns("question answer"),
        lambda row, folder: {
            **listed_aliases(row["answer"], "aliases", "value"),
            "id": row.get("question_id"),
        },
        scorer="em",
        holds=lambda row: isinstance(row["answer"], dict) and "aliases" in row["answer"],
    ),
    RowShape(
        "PopQA",
        "the reference is the first of `possible_answers`; the others count as right",
        _columns("question possible_answers"),
        lambda row, folder: listed_aliases(row, "possible_answers"),
        scorer="em",
    ),
    RowShape(
        "FlashRAG (NQ, TriviaQA, PopQA, 2Wiki, Bamboogle)",
        "the reference is the first of `golden_answers`; the others count as right",
        _columns("question golden_answers"),
        lambda row, folder: listed_aliases(row, "golden_answers"),
        scorer="em",
    ),
    RowShape(
        "NQ-open",
        "the reference is the first of `answer`; the others count as right",
        _columns("question answer"),
        lambda row, folder: listed_aliases(row, "answer"),
        scorer="em",
        holds=lambda row: (
            _is_list("answer")(row) and all(isinstance(o, str) for o in row["answer"])
        ),
    ),
    RowShape(
        "Bamboogle",
        "the question is `Question`, the reference `Answer`",
        _columns("Question Answer"),
        lambda row, folder: {"answer": text_of(row["Answer"])},
        scorer="em",
    ),
    RowShape(
        "Search-R1",
        "the reference is the first of `reward_model.ground_truth.target`; the others count as right",
        _columns("messages answer data_source"),
        lambda row, folder: target_reference(row),
        scorer="em",
        holds=lambda row: isinstance(row["answer"], dict) and "target" in row["answer"],
    ),
    RowShape(
        "verl's GSM8K and MATH, DAPO-Math-17k, Eurus-2-RL (mathematics)",
        "the reference is `reward_model.ground_truth`",
        _columns("messages answer data_source"),
        _math(lambda row: math_reference(row["answer"])),
        scorer="math",
        answer_schema=BOXED,
        holds=lambda row: (
            str(row.get("ability", "")).lower() == "math"
            and isinstance(row["answer"], str | int | float)
        ),
    ),
    RowShape(
        "DAPO-Math-17k (processed)",
        "the reference is `solution`",
        _columns("query solution data_source ability"),
        _math(lambda row: math_reference(row["solution"])),
        scorer="math",
        answer_schema=BOXED,
        holds=lambda row: str(row["ability"]).lower() == "math",
    ),
    RowShape(
        "OpenMathReasoning",
        "the reference is `expected_answer`",
        _columns("problem expected_answer"),
        _math(lambda row: math_reference(row["expected_answer"])),
        scorer="math",
        answer_schema=BOXED,
    ),
    RowShape(
        "MATH-500, AIME, AMC, DeepScaleR, OpenR1-Math, NuminaMath-1.5, Big-Math, Omni-MATH",
        "the reference is `answer`",
        _columns("problem answer"),
        _math(lambda row: math_reference(row["answer"])),
        scorer="math",
        answer_schema=BOXED,
    ),
    RowShape(
        "AIME 2024",
        "the reference is `Answer`",
        _columns("Problem Answer"),
        _math(lambda row: math_reference(row["Answer"])),
        scorer="math",
        answer_schema=BOXED,
    ),
    RowShape(
        "AMC 23",
        "the reference is `answer`",
        _columns("question answer url"),
        _math(lambda row: math_reference(row["answer"])),
        scorer="math",
        answer_schema=BOXED,
        holds=lambda row: isinstance(row["answer"], int | float),
    ),
    RowShape(
        "MATH, NuminaMath-CoT",
        "the reference is the last \\boxed{} of `solution`",
        _columns("problem solution"),
        _math(lambda row: boxed_reference(row["solution"])),
        scorer="math",
        answer_schema=BOXED,
        holds=_is_text("solution"),
    ),
)
