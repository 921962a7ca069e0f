"""The demo's catalogue and questions, drawn from a seed.

Every question needs two or three tool calls, the last of which computes with what the earlier ones
found. Answers are derived by running the right calls, never written down by hand.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    """One kind of question: what to look up, what to compute, and how it is asked.

    `lookups` holds a tool for each value needed: the first is asked about `{item}`, a second about
    `{item}` or, where the question names one, `{other}`. With a single look-up the other operand
    is the question's own number `{n}`.
    """

    name: str
    lookups: tuple[str, ...]
    operation: str
    phrasings: tuple[str, ...]
    two_items: bool = False


KINDS = (
    Kind("total", ("price",), "multiply", ("What do {n} packs of {item} cost?", "Total for {n} packs of {item}?")),
    Kind("delivery", ("price",), "add", ("What is {item} with {n} for delivery?", "Cost of {item} plus {n} fee?")),
    Kind("discount", ("price",), "subtract", ("What is {item} after {n} off?", "Cost of {item} less {n} rebate?")),
    Kind("arrive", ("stock",), "add", ("How much {item} once {n} packs arrive?", "Packs of {item} if we buy {n}?")),
    Kind("sell", ("stock",), "subtract", ("How much {item} once {n} packs sell?", "Packs of {item} if we lose {n}?")),
    Kind("weight", ("stock",), "multiply", ("What does all {item} weigh at {n} each?", "Load of all {item}, {n} each?")),
    Kind("worth", ("price", "stock"), "multiply", ("What is all {item} worth?", "Value of all {item}?")),
    Kind("pair", ("price", "price"), "add", ("What do {item} and {other} cost?", "Price of {item} and {other}?"), True),
    Kind("shelf", ("stock", "stock"), "add", ("How many packs of {item} and {other}?", "Packs of {item} and {other}?"), True),
)  # fmt: skip
THREE_CALL_SHARE = 0.2
"""Share of questions that need three calls; they cost a turn more."""
HELD_OUT_SHARE = 0.1
"""Share of (kind, item) combinations that only the evaluation asks about."""


@dataclass(frozen=True)
class Question:
    """A question with the values that its text was made of."""

    kind: Kind
    phrasing: int
    """Index of the wording among the kind's phrasings."""
    text: str
    item: str
    other: str
    n: int

    def subject(self, index: int) -> str:
        """Return the item that look-up number `index` (from 0) is about."""
        return self.other if index == 1 and self.kind.two_items else self.item


def make_catalogue(seed: int) -> dict[str, dict[str, int]]:
    """Draw a price (10 to 29) and a stock (10 to 49) for every item."""
    draw = random.Random(f"catalogue {seed}")
    return {item: {"price": draw.randint(10, 29), "stock": draw.randint(10, 49)} for item in ITEMS}


def right_answer(catalogue: Catalogue, question: Question) -> str:
    """Answer a question by making the calls that it asks for."""
    kind = question.kind
    found = [
        int(call_tool(catalogue, tool, {"item": question.subject(index)}))
        for index, tool in enumerate(kind.lookups)
    ]
    second = found[1] if len(found) > 1 else question.n
    return call_tool(catalogue, kind.operation, {"a": found[0], "b": second})


def draw_questions(draw: random.Random) -> Iterator[Question]:
    """Draw questions without end; kinds with one look-up and with two by `THREE_CALL_SHARE`."""
    short = [kind for kind in KINDS if len(kind.lookups) == 1]
    long = [kind for kind in KINDS if len(kind.lookups) > 1]
    while True:
        kind = draw.choice(long if draw.random() < THREE_CALL_SHARE else short)
        item, other = draw.sample(ITEMS, 2)
        n = draw.randint(FEWEST, MOST)
        phrasing = draw.randrange(len(kind.phrasings))
        text = kind.phrasings[phrasing].format(item=item, other=other, n=n)
        yield Question(kind, phrasing, text, item, other, n)


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
    path: Path, catalogue: Catalogue, questions: list[Question], prefix: str
) -> None:
    """Write questions as JSONL dataset lines with ids `{prefix}-0000`, ..."""
    lines = [
        json.dumps(
            {
                "id": f"{prefix}-{number:04d}",
                "query": question.text,
                "answer": right_answer(catalogue, question),
                "scorer": "exact",
                "answer_schema": "answer",
                "tag": question.kind.name,
            }
        )
        for number, question in enumerate(questions)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
