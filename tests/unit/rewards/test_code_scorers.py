"""Code of a model runs against tests, and reaches nothing but them."""

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agentrl.errors import ConfigError
from agentrl.rewards import GroundTruth, MCPScorerFactory, code_runs, run_python
from agentrl.runtime.processes.wall import wall_gap

pytestmark = pytest.mark.skipif(wall_gap() is not None, reason="needs namespaces")

DOUBLE = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(0) == 1"]


async def score(answer: str, tests: Any) -> tuple[float, str]:
    truth = GroundTruth(query="", answer=tests)
    found = await MCPScorerFactory.get_scorer("python_tests").score(answer, truth)
    return found.value, found.detail


@pytest.mark.parametrize("form", ["{}", "Here it is:\n```python\n{}```\nDone.", "```\n{}```"])
async def test_the_score_is_the_share_of_tests_passed(form: str) -> None:
    value, detail = await score(form.format(DOUBLE), TESTS)
    assert value == pytest.approx(2 / 3)
    assert detail == "test 3 of 3: AssertionError"


async def test_programs_are_compared_by_what_they_print() -> None:
    tests = [{"stdin": "3 4\n", "stdout": "7"}, {"stdin": "1 1\n", "stdout": "2\n"}]
    good = "print(sum(map(int, input().split())))"
    assert await score(good, tests) == (1.0, "")
    value, detail = await score("input(); print(7)", tests)
    assert (value, detail) == (0.5, r"test 2 of 2: the code printed '7\n' for the input '1 1\n'")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("import os; os._exit(0)", "exit status 0"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("def double(x:", "SyntaxError"),
        ("while True: pass", "no end within"),
        ('print(\'["mark", 0, ""]\')', "NameError"),
        ("while True: print('x' * 9999)", "File too large"),
        ("x = 'a' * (3 << 30)", "MemoryError"),
        ("import socket; socket.create_connection(('127.0.0.1', 27017), 1)", "Error"),
        ("f = open('big', 'wb')\nwhile True: f.write(b'x' * 9999)", "File too large"),
        ("\ud83d", "Error"),
    ],
)
async def test_nothing_that_code_does_passes_a_test(
    answer: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rewards.code_scorers._SECONDS", 3.0)
    value, detail = await score(answer, TESTS[:1])
    assert value == 0.0
    assert reason in detail


async def test_every_result_counts_however_many_fail() -> None:
    tests = [f"assert double({n}) == {n}, 'x' * 400" for n in range(1, 401)] + TESTS[:1] * 100
    value, detail = await score(DOUBLE, tests)
    assert value == pytest.approx(100 / 500)
    assert detail == "test 1 of 500: AssertionError"


async def test_code_that_never_ends_is_scored_after_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.rewards.code_scorers._SECONDS", 1.0)
    monkeypatch.setattr("agentrl.rewards.code_scorers._ALL_SECONDS", 2.0)
    started = time.monotonic()
    value, _ = await score("while True: pass", [{"stdin": "", "stdout": ""}] * 30)
    assert value == 0.0
    assert time.monotonic() - started < 15


async def test_brackets_by_the_hundred_thousand_are_no_outage() -> None:
    for answer in ("[" * 100_000, "(" * 100_000 + ")" * 100_000, "-" * 100_000 + "1"):
        value, detail = await score(answer, TESTS[:1])
        assert value == 0.0
        assert detail


async def test_code_sees_neither_files_nor_processes_nor_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answers.jsonl").write_text("42")
    monkeypatch.setenv("SECRET", "hush")
    program = (
        "import os, pathlib\n"
        f"print(pathlib.Path({str(tmp_path)!r}).exists(), 'SECRET' in os.environ)\n"
        "print(sorted(n for n in os.listdir('/proc') if n.isdigit()), os.listdir('.'))\n"
        "import sys\n"
        "print(os.path.exists('/etc/shadow'), os.access(sys.base_prefix, os.W_OK))\n"
        "import numpy\n"
    )
    run = await run_python(program)
    assert (run.status, run.errors) == (0, "")
    first, processes, machine = run.output.splitlines()
    assert first == "False False"
    assert "['1', '2'] ['program.py']" in processes
    assert machine == "False False"


async def test_a_program_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = f"/agentrl-{uuid4()}"  # in the command line of every process
    monkeypatch.setattr(code_runs, "_DIRECTORY", directory)
    started = time.monotonic()
    run = await run_python(
        "import os, time\nif os.fork():\n    os._exit(0)\nos.setsid()\ntime.sleep(60)", seconds=2
    )
    assert time.monotonic() - started < 10
    assert run.status in (0, None)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, directory)]


def _names(path: Path, directory: str) -> bool:
    try:
        return directory.encode() in path.read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("tests", [[], [3], [{"stdin": "1"}], {"stdin": 1, "stdout": "1"}])
def test_tests_that_cannot_run_are_refused_with_the_question(tests: Any) -> None:
    with pytest.raises(ConfigError, match="scorer 'python_tests': "):
        MCPScorerFactory.check_question("python_tests", [tests])


async def test_a_machine_without_namespaces_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_runs, "wall_gap", lambda: "unshare: Operation not permitted")
    with pytest.raises(ConfigError, match="runs only in namespaces of its own, which this machine"):
        await run_python("print(1)")
    with pytest.raises(ConfigError, match="this machine refuses"):
        MCPScorerFactory.check_question("python_tests", [TESTS])
