import json
from pathlib import Path

import pytest

from examples.shop.questions import (
    ITEMS,
    KINDS,
    Question,
    make_catalogue,
    split_questions,
    write_questions,
)
from examples.shop.server import CATALOGUE as WHOLE

ASSETS = Path(__file__).resolve().parents[3] / "assets" / "demo"
CATALOGUE = {"rice": {"price": 12, "stock": 30}}


def read_lines(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ASSETS / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("total", "48"),
        ("delivery", "16"),
        ("discount", "8"),
        ("arrive", "34"),
        ("sell", "26"),
        ("weight", "120"),
    ],
)
def test_every_kind_is_answered_from_the_catalogue(kind: str, expected: str) -> None:
    by_name = {kind.name: kind for kind in KINDS}
    question = Question(by_name[kind], 0, "rice", 4)
    assert question.answer(CATALOGUE) == expected


def test_the_expected_answers_cover_every_kind() -> None:
    assert len(KINDS) == 6


def test_no_phrasing_belongs_to_two_kinds() -> None:
    phrasings = [phrasing for kind in KINDS for phrasing in kind.phrasings]
    assert len(set(phrasings)) == len(phrasings)


def test_every_pair_of_a_look_up_and_an_operation_is_asked_for() -> None:
    assert len({(kind.lookup, kind.operation) for kind in KINDS}) == 6


def test_train_and_eval_share_no_text_and_no_combination() -> None:
    train, evaluation = split_questions(3, 500, 60)
    assert (len(train), len(evaluation)) == (500, 60)
    assert not {q.text for q in train} & {q.text for q in evaluation}
    assert not {(q.kind.name, q.item) for q in train} & {(q.kind.name, q.item) for q in evaluation}
    assert len({q.text for q in train}) == 500


def test_the_same_seed_draws_the_same_questions() -> None:
    assert split_questions(5, 50, 10) == split_questions(5, 50, 10)
    assert split_questions(5, 50, 10) != split_questions(6, 50, 10)


def test_the_shipped_files_are_what_the_seed_draws(tmp_path: Path) -> None:
    catalogue = make_catalogue(0)
    assert catalogue == WHOLE
    train, evaluation = split_questions(0, 2000, 100)
    for name, questions in (("train", train), ("eval", evaluation)):
        path = tmp_path / f"{name}.jsonl"
        write_questions(path, catalogue, questions, name)
        assert path.read_bytes() == (ASSETS / f"{name}.jsonl").read_bytes()


def test_shipped_ids_and_queries_are_unique() -> None:
    lines = read_lines("train.jsonl") + read_lines("eval.jsonl")
    assert len({line["id"] for line in lines}) == len({line["query"] for line in lines}) == 2100
    assert {line["scorer"] for line in lines} == {"exact"}
    assert {line["answer_schema"] for line in lines} == {"answer"}


def test_answers_cannot_be_given_without_the_catalogue() -> None:
    train, _ = split_questions(0, 200, 10)
    answers = [[question.answer(make_catalogue(seed)) for question in train] for seed in (0, 1)]
    agreeing = sum(a == b for a, b in zip(*answers, strict=True))
    assert agreeing < 0.1 * len(train)


def test_item_names_are_plain_words() -> None:
    assert len(set(ITEMS)) == len(ITEMS) == 40
    assert all(item.isalpha() and item.islower() for item in ITEMS)
