"""Demonstrations of the shop's questions: conversations with tool calls, for any model.

A demonstration follows the protocol and copies names and numbers correctly; its choices follow
habits, so that a model that imitates them is right now and then, and has something to learn from
rewards. `agentrl sft --train_file examples/shop/demonstrations.py` trains on `demonstrations()`.
"""

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # wherever the command was started

from examples.shop.questions import Question, make_catalogue, split_questions
from examples.shop.server import TOOLS, call_tool

TOOL_SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": shape.name,
            "description": shape.description,
            "parameters": shape.input_schema,
        },
    }
    for shape in TOOLS.values()
]
NUM_DEMONSTRATIONS = 256


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of correct choices, by the wording of the question (first, second).

    With the defaults, the operation of the first wording is uncertain, and the look-up of the second
    is mostly wrong.
    """

    right_lookup: tuple[float, float] = (0.95, 0.3)
    right_operation: tuple[float, float] = (0.5, 0.95)
    misreading: float = 0.75
    """Share of wrong operations that are the typical mistake (`MISREAD`)."""


FLAWLESS = Habits(right_lookup=(1.0, 1.0), right_operation=(1.0, 1.0))
OTHER_LOOKUP = {"price": "stock", "stock": "price"}
MISREAD = {"add": "subtract", "subtract": "multiply", "multiply": "add"}


@dataclass(frozen=True)
class Call:
    """A tool call with its result."""

    tool: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Solution:
    """What a demonstration does with a question."""

    question: Question
    calls: tuple[Call, Call]
    answer: str
    is_right: bool


def solve(question: Question, draw: random.Random, habits: Habits = FLAWLESS) -> Solution:
    """Answer a question with choices according to the habits.

    Prices and stocks are drawn anew, so that a model cannot memorize them.
    """
    catalogue = make_catalogue(draw.getrandbits(64))

    def call(tool: str, arguments: dict[str, Any]) -> Call:
        return Call(tool, arguments, call_tool(catalogue, tool, arguments))

    kind = question.kind
    knows = draw.random() < habits.right_lookup[question.wording]
    found = call(kind.lookup if knows else OTHER_LOOKUP[kind.lookup], {"item": question.item})
    operation = _choose_operation(question, draw, habits)
    computed = call(operation, {"a": int(found.result), "b": question.n})
    is_right = computed.result == question.answer(catalogue)
    return Solution(question, (found, computed), computed.result, is_right)


def conversation(solution: Solution) -> dict[str, Any]:
    """Return a solution in OpenAI's form of a conversation with tools."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": solution.question.text}]
    for number, call in enumerate(solution.calls):
        call_id = f"call_{number}"
        function = {"name": call.tool, "arguments": call.arguments}
        calls = [{"id": call_id, "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": call.result})
    messages.append({"role": "assistant", "content": f"<answer>{solution.answer}</answer>"})
    return {"messages": messages, "tools": TOOL_SCHEMAS}


def demonstrations(
    num: int = NUM_DEMONSTRATIONS, *, seed: int = 0, habits: Habits | None = None
) -> Iterator[dict[str, Any]]:
    """Yield conversations about the demo's training questions, with uncertain choices.

    Args:
        num: number of conversations; with more than there are questions, these repeat.
        seed: of the choices.
        habits: probabilities of correct choices; by default those of the demo.
    """
    draw = random.Random(f"demonstrations {seed}")
    questions, _ = split_questions(0, 2000, 0)
    for question in itertools.islice(itertools.cycle(questions), num):
        yield conversation(solve(question, draw, habits or Habits()))


def misread(operation: str, draw: random.Random, typical: float = Habits.misreading) -> str:
    """Return a wrong operation: with the probability `typical`, the typical mistake."""
    if draw.random() < typical:
        return MISREAD[operation]
    return next(name for name in MISREAD if name not in (operation, MISREAD[operation]))


def _choose_operation(question: Question, draw: random.Random, habits: Habits) -> str:
    right = question.kind.operation
    if draw.random() < habits.right_operation[question.wording]:
        return right
    return misread(right, draw, habits.misreading)
