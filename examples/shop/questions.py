"""The demo's catalogue and questions, drawn from a seed.

Every question needs two tool calls, the second of which computes with the result of the first.
Answers are computed by running the correct calls.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from examples.shop.server import Catalogue, call_tool

ITEMS = (
    "rice", "salt", "tea", "flour", "sugar", "honey", "coffee", "pepper",
    "corn", "oats", "pasta", "beans", "nuts", "figs", "dates", "plums",
    "grapes", "olives", "butter", "cheese", "milk", "cream", "jam", "bread",
    "soap", "candles", "paper", "ink", "glue", "tape", "nails", "screws",
    "wire", "rope", "paint", "chalk", "pens", "wool", "silk", "cotton",
)  # fmt: skip
FEWEST, MOST = 2, 9
"""Range of the number that a question itself names."""


@dataclass(frozen=True)
class Kind:
    """One kind of question: the look-up, the operation on its result, and the phrasings.

    The operation's first operand is the result of the look-up of `{item}`, its second the number
    `{n}` in the question.
    """

    name: str
    lookup: str
    operation: str
    phrasings: tuple[str, str]


KINDS = (
    Kind("total", "price", "multiply", ("{item}: what do {n} packs cost?", "{item}: total for {n} packs?")),
    Kind("delivery", "price", "add", ("{item}: cost with {n} for delivery?", "{item}: what is it plus a fee of {n}?")),
    Kind("discount", "price", "subtract", ("{item}: cost after {n} off?", "{item}: what is it less a rebate of {n}?")),
    Kind("arrive", "stock", "add", ("{item}: packs once {n} arrive?", "{item}: how many if we buy {n}?")),
    Kind("sell", "stock", "subtract", ("{item}: packs once {n} sell?", "{item}: how many if we lose {n}?")),
    Kind("weight", "stock", "multiply", ("{item}: weight of all at {n} each?", "{item}: load of all, {n} each?")),
)  # fmt: skip
HELD_OUT_SHARE = 0.1
"""Share of (kind, item) combinations that only the evaluation asks about."""


class Asked(Protocol):
    """A question that a catalogue answers."""

    @property
    def text(self) -> str:
        """The question as the user asks it."""

    @property
    def tag(self) -> str:
        """What the question is like."""

    def answer(self, catalogue: Catalogue) -> str:
        """Answer the question by making the calls that it requires."""


@dataclass(frozen=True)
class Question:
    """A question, with the values in its text."""

    kind: Kind
    wording: int
    """Index among the kind's phrasings."""
    item: str
    n: int

    @property
    def text(self) -> str:
        """The question as the user asks it."""
        return self.kind.phrasings[self.wording].format(item=self.item, n=self.n)

    @property
    def tag(self) -> str:
        """What the question is like: its kind."""
        return self.kind.name

    def answer(self, catalogue: Catalogue) -> str:
        """Answer the question by making the calls that it requires."""
        found = call_tool(catalogue, self.kind.lookup, {"item": self.item})
        return call_tool(catalogue, self.kind.operation, {"a": int(found), "b": self.n})


def make_catalogue(seed: int) -> dict[str, dict[str, int]]:
    """Draw a price (10 to 29) and a stock (10 to 49) for every item."""
    draw = random.Random(f"catalogue {seed}")
    return {item: {"price": draw.randint(10, 29), "stock": draw.randint(10, 49)} for item in ITEMS}


def draw_questions(draw: random.Random) -> Iterator[Question]:
    """Draw an endless sequence of questions."""
    while True:
        kind = draw.choice(KINDS)
        wording = draw.randrange(len(kind.phrasings))
        yield Question(kind, wording, draw.choice(ITEMS), draw.randint(FEWEST, MOST))


def split_questions(
    seed: int, num_train: int, num_eval: int
) -> tuple[list[Question], list[Question]]:
    """Draw the training and the evaluation questions.

    No text occurs twice, and the (kind, item) combinations of the evaluation never occur in
    training.
    """
    draw = random.Random(f"questions {seed}")
    combinations = [(kind.name, item) for kind in KINDS for item in ITEMS]
    held_out = set(draw.sample(combinations, round(HELD_OUT_SHARE * len(combinations))))
    seen: set[str] = set()
    train: list[Question] = []
    evaluation: list[Question] = []
    for question in draw_questions(draw):
        if len(train) == num_train and len(evaluation) == num_eval:
            break
        if question.text in seen:
            continue
        seen.add(question.text)
        is_held_out = (question.kind.name, question.item) in held_out
        bucket, size = (evaluation, num_eval) if is_held_out else (train, num_train)
        if len(bucket) < size:
            bucket.append(question)
    return train, evaluation


def write_questions(
    path: Path, catalogue: Catalogue, questions: Sequence[Asked], prefix: str
) -> None:
    """Write questions as JSONL dataset lines with ids `{prefix}-0000`, ..."""
    lines = [
        json.dumps(
            {
                "id": f"{prefix}-{number:04d}",
                "query": question.text,
                "answer": question.answer(catalogue),
                "scorer": "exact",
                "answer_schema": "answer",
                "tag": question.tag,
            }
        )
        for number, question in enumerate(questions)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
