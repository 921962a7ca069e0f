import base64
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from support.known_rows import CODE, KNOWN, REFUSED, Known, Refused

from agentrl.config.sections import DataSection
from agentrl.datasets.entries import BadEntry
from agentrl.datasets.question import Question, question_of, with_own_names
from agentrl.datasets.row_shapes import SHAPES, shapes_of
from agentrl.rewards import MCPScorerFactory, extract_answer
from agentrl.schema import GroundTruth
from agentrl.schema.answer_form import added_instruction, asked_schema, is_asked, written

PAGE = Path(__file__).parents[3] / "docs/datasets.md"


def read(row: Any, folder: Path = Path(), **flags: Any) -> Question:
    return question_of(row, DataSection(**flags), "line 1", folder)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.data_set)
async def test_a_row_is_read_as_it_stands_and_scored_rightly(known: Known) -> None:
    question = read(known.row)
    assert known.question in question.query
    assert (question.answer, question.aug_answers) == (known.reference, known.aliases)
    assert (question.scorer, question.answer_schema) == (known.scorer, known.schema)
    MCPScorerFactory.check_question(question.scorer, [question.answer])
    truth = GroundTruth(
        query=question.query, answer=question.answer, aug_answers=question.aug_answers
    )
    scorer = MCPScorerFactory.get_scorer(question.scorer)
    values = [
        (await scorer.score(extract_answer(reply, question.answer_schema), truth)).value
        for reply in (known.right, known.wrong)
    ]
    assert values == [1.0, 0.0]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.data_set)
def test_a_model_is_told_the_schema_that_is_looked_for(known: Known) -> None:
    question = read(known.row)
    told = question.query + added_instruction("auto", question.answer_schema, question.query)
    assert asked_schema(told) in (question.answer_schema, None)
    assert is_asked(question.answer_schema, told)
    assert question.other_request is None


@pytest.mark.parametrize("known", CODE, ids=lambda known: known.data_set)
def test_unit_tests_become_the_reference_of_the_users_scorer(known: Known) -> None:
    with pytest.raises(BadEntry, match="--scorer_module"):
        read(known.row)
    question = read(known.row, default_scorer="mine")
    assert known.question in question.query
    assert question.answer == known.reference
    assert (question.scorer, question.answer_schema) == ("mine", known.schema)


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.data_set)
def test_a_row_that_cannot_be_read_is_refused_with_what_to_do(refused: Refused) -> None:
    with pytest.raises(BadEntry) as caught:
        read(refused.row)
    assert refused.advice in str(caught.value)


def test_every_shape_has_a_row_and_no_row_fits_two_shapes_equally_well() -> None:
    rows = [*(one.row for one in (*KNOWN, *CODE)), *(one.row for one in REFUSED)]
    fitting = [shapes_of(with_own_names(row)) for row in rows]
    assert {best.name for best, *_ in fitting} == {shape.name for shape in SHAPES}
    for best, *others in fitting:
        assert best.rank > max((shape.rank for shape in others), default=(0, 0)), best.name


def test_flags_and_the_row_win_over_the_shape() -> None:
    row = {"question": "How many?", "answer": "3+5=8\n#### 8"}
    chosen = read(row, default_scorer="em", default_answer_schema="result")
    assert (chosen.answer, chosen.scorer, chosen.answer_schema) == ("8", "em", "result")
    plain = read(row, row_format="plain")
    assert (plain.answer, plain.scorer, plain.answer_schema) == (row["answer"], "exact", "answer")
    own = read({**row, "scorer": "mine"})
    assert (own.answer, own.read_as) == (row["answer"], "")


def test_a_text_that_asks_for_another_schema_is_noticed() -> None:
    row = {"query": "2+2? Write it after ####", "answer": "4"}
    assert read(row).answer_schema == "####"
    assert read(row, default_answer_schema="answer").other_request == "####"
    assert read({"query": "Question: 2+2?\nAnswer:", "answer": "4"}).answer_schema == "answer"


def test_attachments_are_shown_added_or_refused_by_name(tmp_path: Path) -> None:
    row = {"Question": "Sum?", "Final answer": "8", "file_name": "sums.csv", "task_id": "g"}
    (tmp_path / "sums.csv").write_text("a,b\n3,5\n")
    assert "a,b\n3,5" in read(row, tmp_path).query
    (tmp_path / "sums.xlsx").write_bytes(b"PK")
    with pytest.raises(BadEntry, match=r"sums\.xlsx.*convert it"):
        read({**row, "file_name": "sums.xlsx"}, tmp_path)


def test_private_tests_that_name_code_are_refused() -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(Path))).decode()
    row = next(one.row for one in CODE if one.data_set == "LiveCodeBench")
    with pytest.raises(BadEntry, match="never run"):
        read({**row, "private_test_cases": packed}, default_scorer="mine")


def test_the_page_lists_what_is_read() -> None:
    page = PAGE.read_text()
    for line in table_lines():
        assert line in page, f"docs/datasets.md lacks: {line}"


def table_lines() -> list[str]:
    """Return the rows of the tables of docs/datasets.md."""

    def shown(value: Any) -> str:
        text = str(value).replace("|", "\\|").replace("\n", "\\n")
        return f"`{text}`"

    lines = []
    for one in KNOWN:
        others = f", also {', '.join(map(shown, one.aliases))}" if one.aliases else ""
        columns = ", ".join(f"`{name}`" for name in list(one.row)[:4])
        form = shown(written(one.schema)) if one.schema != "```" else "a fenced block"
        lines.append(
            f"| {one.data_set} | {columns} | {shown(one.reference)}{others} | `{one.scorer}` | {form} |"
        )
    lines += [
        f"| {one.data_set} | {', '.join(f'`{name}`' for name in list(one.row)[:4])} | "
        f"{shown(one.reference)} |"
        for one in CODE
    ]
    lines += [f"| {one.data_set} | {shown(one.advice)} |" for one in REFUSED]
    return lines
