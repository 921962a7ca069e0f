"""Scorer of programs: `python_tests` runs an answer's code against the tests of the question."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.rewards.code_runs import CodeRun, code_gap, run_connected, run_python
from agentrl.rewards.factory import MCPScorerFactory, Verdict
from agentrl.schema import GroundTruth

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_IN_AND_OUT = {"stdin", "stdout"}
_SECONDS = 10.0
_ALL_SECONDS = 30.0
"""For all tests of an answer: code that never ends must not keep its record from a score."""
_MAX_DETAIL = 400
_EXCHANGE = Path(__file__).with_name("code_exchange.py")


def _check_tests(answer: Any) -> str | None:
    tests = answer if isinstance(answer, list) else [answer]
    for test in tests:
        is_pair = isinstance(test, Mapping) and test.keys() == _IN_AND_OUT
        if not isinstance(test, str) and not (
            is_pair and all(isinstance(text, str) for text in test.values())
        ):
            return (
                'a test is a Python statement, such as "assert f(2) == 4", or '
                f'{{"stdin": TEXT, "stdout": TEXT}}, not {str(test)[:80]!r}'
            )
    return code_gap() if tests else "the list of tests is empty"


@MCPScorerFactory.register_scorer(
    "python_tests", version="2", needs_answer=True, check_answer=_check_tests
)
async def python_tests(answer: str, truth: GroundTruth) -> Verdict:
    """Return the share of tests that the answer's code passes.

    The reference is a test or a list of tests. A statement (`assert f(2) == 4`) runs in another
    process than the code, and sees its names. A test of the form `{"stdin", "stdout"}` runs the code as a program and
    compares what it prints, apart from space at the ends of lines. The last fenced block of the
    answer is the code, or the whole answer without one.
    """
    code = answered_code(answer)
    tests = truth.answer if isinstance(truth.answer, list) else [truth.answer]
    statements = {number: test for number, test in enumerate(tests) if isinstance(test, str)}
    problems, seconds = await _failed_statements(code, statements) if statements else ({}, 0.0)
    for number, test in enumerate(tests):
        if isinstance(test, str):
            continue
        if seconds >= _ALL_SECONDS:
            problems[number] = f"the earlier tests took all of {_ALL_SECONDS:g} s"
            continue
        problem, spent = await _failed_program(code, test, min(_SECONDS, _ALL_SECONDS - seconds))
        problems |= {number: problem} if problem else {}
        seconds += spent
    detail = next(
        (f"test {n + 1} of {len(tests)}: {why}" for n, why in sorted(problems.items())), ""
    )
    return Verdict(1 - len(problems) / len(tests), detail=detail[:_MAX_DETAIL])


def answered_code(answer: str) -> str:
    """Return the code of an answer: its last fenced block, or all of it."""
    blocks = _FENCED.findall(answer)
    return str(blocks[-1]) if blocks else answer


async def _failed_statements(code: str, tests: Mapping[int, str]) -> tuple[dict[int, str], float]:
    """Return why tests failed, by their number, and the time they took.

    The code runs in a process that never has the text of a test (`code_exchange`).
    """
    answer, run = await run_connected(
        _EXCHANGE.read_text(),
        {"answer.py": code},
        {"tests.json": json.dumps(list(tests.values()))},
        seconds=_SECONDS,
    )
    ended = _end(answer) if run.status is not None else f"no end within {_SECONDS:g} s"
    results: dict[int, str | None] = {}
    for line in run.errors.splitlines():
        with suppress(ValueError, TypeError):  # a line may have been cut
            position, reason = json.loads(line)
            results[position] = reason
    problems: dict[int, str] = {}
    for position, number in enumerate(tests):
        reason = results.get(position)
        if reason != "":
            problems[number] = ended if reason is None else reason
    return problems, run.seconds


async def _failed_program(code: str, test: Mapping[str, str], seconds: float) -> tuple[str, float]:
    """Return why the program failed, if it did, and the time it took."""
    run = await run_python(code, stdin=test["stdin"], seconds=seconds)
    if run.status != 0:
        return _end(run), run.seconds
    if _lines(run.output) == _lines(test["stdout"]):
        return "", run.seconds
    shown = f"{run.output[:_MAX_DETAIL]!r} for the input {test['stdin'][:80]!r}"
    return f"the code printed {shown}", run.seconds


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _end(run: CodeRun) -> str:
    """Return why a program ended, in one line."""
    lines = run.errors.strip().splitlines()
    return lines[-1] if lines else f"the code ended with exit status {run.status}"
