"""Scorer of programs: `python_tests` runs an answer's code against the tests of the question."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.rewards.code_runs import CodeRun, code_gap, run_python
from agentrl.rewards.factory import MCPScorerFactory, Verdict
from agentrl.schema import GroundTruth

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_IN_AND_OUT = {"stdin", "stdout"}
_SECONDS = 10.0
_ALL_SECONDS = 30.0
"""For all tests of an answer: code that never ends must not keep its record from a score."""
_MAX_DETAIL = 400
_HARNESS = """\
import json, os, sys
tests, mark = json.loads(sys.stdin.readline())
shown = os.dup(1)
os.dup2(2, 1)
names = {"__name__": "answer"}
with open("answer.py") as file:
    exec(compile(file.read(), "answer.py", "exec"), names)
has_failed = False
for number, test in enumerate(tests):
    try:
        exec(compile(test, f"test {number}", "exec"), names)
    except Exception as error:
        # Only the first is shown, and what is shown has room for every result.
        text = "fails" if has_failed else f"{test}: {type(error).__name__}: {error}"
        has_failed = True
    else:
        text = ""
    os.write(shown, (json.dumps([mark, number, text[:400]]) + "\\n").encode())
"""


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


@MCPScorerFactory.register_scorer("python_tests", needs_answer=True, check_answer=_check_tests)
async def python_tests(answer: str, truth: GroundTruth) -> Verdict:
    """Return the share of tests that the answer's code passes.

    The reference is a test or a list of tests. A statement (`assert f(2) == 4`) runs after the code,
    in its namespace. A test of the form `{"stdin", "stdout"}` runs the code as a program and
    compares what it prints, apart from space at the ends of lines. The last fenced block of the
    answer is the code, or the whole answer without one.
    """
    code = answered_code(answer)
    tests = truth.answer if isinstance(truth.answer, list) else [truth.answer]
    statements = [test for test in tests if isinstance(test, str)]
    problems, seconds = await _failed_statements(code, statements) if statements else ([], 0.0)
    for test in tests:
        if isinstance(test, str):
            continue
        if seconds >= _ALL_SECONDS:
            problems.append(f"the earlier tests took all of {_ALL_SECONDS:g} s")
            continue
        problem, spent = await _failed_program(code, test, min(_SECONDS, _ALL_SECONDS - seconds))
        problems += problem
        seconds += spent
    detail = problems[0][:_MAX_DETAIL] if problems else ""
    return Verdict(1 - len(problems) / len(tests), detail=detail)


def answered_code(answer: str) -> str:
    """Return the code of an answer: its last fenced block, or all of it."""
    blocks = _FENCED.findall(answer)
    return str(blocks[-1]) if blocks else answer


async def _failed_statements(code: str, tests: Sequence[str]) -> tuple[list[str], float]:
    """Return a line for each statement that failed, and the time they took."""
    mark = secrets.token_hex(16)  # the code may print, but cannot print a result
    run = await run_python(
        _HARNESS,
        stdin=json.dumps([tests, mark]) + "\n",
        files={"answer.py": code},
        seconds=_SECONDS,
    )
    results: dict[int, str] = {}
    for line in run.output.splitlines():
        try:
            found, number, text = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if found == mark and number not in results:
            results[number] = text
    ended = _end(run)
    problems = (results.get(number, f"{test}: {ended}") for number, test in enumerate(tests))
    return [problem for problem in problems if problem], run.seconds


async def _failed_program(
    code: str, test: Mapping[str, str], seconds: float
) -> tuple[list[str], float]:
    """Return a line if the program failed, and the time it took."""
    run = await run_python(code, stdin=test["stdin"], seconds=seconds)
    if run.status != 0:
        return [_end(run)], run.seconds
    if _lines(run.output) == _lines(test["stdout"]):
        return [], run.seconds
    problem = f"it printed {run.output[:_MAX_DETAIL]!r} for the input {test['stdin'][:80]!r}"
    return [problem], run.seconds


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _end(run: CodeRun) -> str:
    """Return why a program ended, in one line."""
    lines = run.errors.strip().splitlines()
    return lines[-1] if lines else f"exit status {run.status}"
