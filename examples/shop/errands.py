"""Questions with several errands: three to six calculations in a row, right only if all of them are.

"soap: packs once arrive 4, lose 3, sell 7?" needs the stock of soap, then a call for each errand
that computes with the result of the call before: five to eight turns with one reward at the end.
The demonstrations of its warm start follow habits: one wording of each errand is nearly always
understood, the other is often misread. `scripts/make_demo_model.py --errands` writes everything again.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.shop.demonstrations import OTHER_LOOKUP, Call, misread
from examples.shop.episodes import Codec, Episode, demonstrated
from examples.shop.questions import FEWEST, ITEMS, MOST, make_catalogue, write_questions
from examples.shop.server import Catalogue, call_tool

NUM_TRAIN, NUM_EVAL = 2000, 100
NUM_HELD_OUT = 8
"""Pairs of a subject and an item that only the evaluation asks about."""
LENGTHS = (3, 4, 5, 6)
"""Numbers of errands in a question."""
MOST_TURNS = LENGTHS[-1] + 3
"""Of an attempt: the longest one, with a turn to spare."""


@dataclass(frozen=True)
class Subject:
    """What a question starts from, and the wordings of its errands: one clear, one unclear."""

    lookup: str
    opening: str
    wordings: dict[str, tuple[str, str]]


SUBJECTS = (
    Subject(
        "stock",
        "{item}: packs once ",
        {
            "add": ("arrive {n}", "buy {n}"),
            "subtract": ("sell {n}", "lose {n}"),
            "multiply": ("weight {n}", "load {n}"),
        },
    ),
    Subject(
        "price",
        "{item}: cost with ",
        {
            "add": ("delivery {n}", "fee {n}"),
            "subtract": ("off {n}", "rebate {n}"),
            "multiply": ("total {n}", "packs {n}"),
        },
    ),
)
RIGHT_LOOKUP = 0.97
RIGHT_OPERATION = (0.97, 0.4)
"""Probability of the right operation in a demonstration, by wording: the second one is taken for
another operation more often than not."""


@dataclass(frozen=True)
class Errand:
    """One calculation with the result so far."""

    operation: str
    wording: int
    n: int


@dataclass(frozen=True)
class ErrandQuestion:
    """A question, with the values in its text."""

    subject: Subject
    item: str
    errands: tuple[Errand, ...]

    @property
    def text(self) -> str:
        """The question as the user asks it."""
        parts = [
            self.subject.wordings[one.operation][one.wording].format(n=one.n)
            for one in self.errands
        ]
        return self.subject.opening.format(item=self.item) + ", ".join(parts) + "?"

    @property
    def tag(self) -> str:
        """What the question is like: its length."""
        return f"{len(self.errands)} errands"

    def answer(self, catalogue: Catalogue) -> str:
        """Answer the question by making the calls that it requires."""
        operations = [one.operation for one in self.errands]
        return _calls(catalogue, self, self.subject.lookup, operations)[-1].result


def draw_errands(draw: random.Random) -> ErrandQuestion:
    """Draw a question.

    Its numbers differ, so that each of them names its errand, and it multiplies at most once.
    """
    numbers = draw.sample(range(FEWEST, MOST + 1), draw.choice(LENGTHS))
    operations = [draw.choice(("add", "subtract")) for _ in numbers]
    if draw.random() < 2 / 3:
        operations[draw.randrange(len(operations))] = "multiply"
    errands = [
        Errand(operation, draw.randrange(2), n)
        for operation, n in zip(operations, numbers, strict=True)
    ]
    return ErrandQuestion(draw.choice(SUBJECTS), draw.choice(ITEMS), tuple(errands))


def split_errands(
    seed: int, num_train: int, num_eval: int
) -> tuple[list[ErrandQuestion], list[ErrandQuestion]]:
    """Draw the training and the evaluation questions.

    No text occurs twice, and the pairs of a subject and an item of the evaluation never occur in
    training.
    """
    draw = random.Random(f"errands {seed}")
    pairs = [(subject.lookup, item) for subject in SUBJECTS for item in ITEMS]
    held_out = set(draw.sample(pairs, NUM_HELD_OUT))
    train: dict[str, ErrandQuestion] = {}
    evaluation: dict[str, ErrandQuestion] = {}
    while len(train) < num_train or len(evaluation) < num_eval:
        question = draw_errands(draw)
        is_held_out = (question.subject.lookup, question.item) in held_out
        bucket, size = (evaluation, num_eval) if is_held_out else (train, num_train)
        if len(bucket) < size:
            bucket[question.text] = question
    return list(train.values()), list(evaluation.values())


def demonstrate_errands(codec: Codec, question: ErrandQuestion, draw: random.Random) -> Episode:
    """Demonstrate a question with the correct protocol, and choices according to the habits.

    Prices and stocks are drawn anew, so that a model cannot memorize them.
    """
    lookup = question.subject.lookup
    if draw.random() >= RIGHT_LOOKUP:
        lookup = OTHER_LOOKUP[lookup]
    operations = [
        one.operation
        if draw.random() < RIGHT_OPERATION[one.wording]
        else misread(one.operation, draw)
        for one in question.errands
    ]
    calls = _calls(make_catalogue(draw.getrandbits(64)), question, lookup, operations)
    return demonstrated(codec, question, calls, calls[-1].result)


def _calls(
    catalogue: Catalogue, question: ErrandQuestion, lookup: str, operations: Sequence[str]
) -> list[Call]:
    """Return the look-up and the operations on its result, with their results."""
    arguments: dict[str, Any] = {"item": question.item}
    calls = [Call(lookup, arguments, call_tool(catalogue, lookup, arguments))]
    for errand, operation in zip(question.errands, operations, strict=True):
        arguments = {"a": int(calls[-1].result), "b": errand.n}
        calls.append(Call(operation, arguments, call_tool(catalogue, operation, arguments)))
    return calls


def write_errands(folder: Path) -> None:
    """Write both question files into a folder."""
    train, evaluation = split_errands(0, NUM_TRAIN, NUM_EVAL)
    for name, questions in (("train", train), ("eval", evaluation)):
        write_questions(folder / f"{name}.jsonl", make_catalogue(0), questions, f"errands-{name}")
