"""Scorers of a file run in a process of their own, which they may end, block or leave hanging."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.patience import PATIENCE

from agentrl.errors import ConfigError, ScorerDefect, ScorerTimeout, ScoringError
from agentrl.rewards import GroundTruth, MCPScorerFactory, Scorer, load_scorer_module
from agentrl.schema import Record

TRUTH = GroundTruth(query="q", answer="abc")
HEAD = "import os, re, sys, time\nfrom agentrl.rewards import MCPScorerFactory, Verdict\n\n\n"

Scorers = Callable[..., Scorer]


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Scorers]:
    """Writes a file with one scorer, `mine`, loads it, and returns the scorer."""
    before = dict(MCPScorerFactory._scorers)

    def write(body: str, *, head: str = "def mine(answer, truth):", **traits: object) -> Scorer:
        named = "".join(f", {name}={value!r}" for name, value in traits.items())
        register = f"@MCPScorerFactory.register_scorer('mine'{named})\n"
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        path = tmp_path / "mine.py"
        path.write_text(HEAD + register + head + "\n" + lines)
        load_scorer_module(path)
        return MCPScorerFactory.get_scorer("mine")

    yield write
    MCPScorerFactory._scorers.clear()
    MCPScorerFactory._scorers.update(before)


async def test_what_a_function_returns_comes_back_from_its_process(written: Scorers) -> None:
    scorer = written(
        "import numpy as np\n"
        "print('not a reply')\n"
        "assert not sys.stdin.read()\n"
        "return Verdict(np.float32(0.5), detail=truth.answer, inputs={'pid': os.getpid(), 'a': "
        "np.arange(2)}, parts={'p': 0.25})"
    )
    score = await scorer.score("x", TRUTH)
    assert (score.value, score.detail, score.parts) == (0.5, "abc", {"p": 0.25})
    assert (score.inputs["a"], score.inputs["answer"]) == ([0, 1], "x")
    assert score.inputs["pid"] != os.getpid()
    again = await scorer.score("x", TRUTH)
    assert again.inputs["pid"] == score.inputs["pid"]


async def test_a_group_is_judged_there_too(written: Scorers) -> None:
    scorer = written(
        "return [len(record.final_answer or '') for record in records]",
        head="async def mine(records, truth):",
        sees_group=True,
    )
    tries = [
        Record(id=f"t/{n}", task_id="t", split="train", traj_id=n, order=0, final_answer=answer)
        for n, answer in enumerate(("a", None, "bb"))
    ]
    scores = await scorer.score_group(tries, TRUTH)
    assert [score.value for score in scores] == [1, 0, 2]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os._exit(3)", "its process exited with status 3"),
        ("os.kill(os.getpid(), 11)", "its process was killed by SIGSEGV"),
        ("sys.exit('enough')", r"exited the program \(enough\)"),
    ],
)
async def test_a_function_that_ends_its_process_fails_alone(
    end: str, said: str, written: Scorers
) -> None:
    scorer = written(f"if answer == 'die':\n    {end}\ntime.sleep(0.2)\nreturn 1.0")
    answers = ["a", "b", "die", "c", "d"]
    found = await asyncio.gather(
        *(scorer.score(answer, TRUTH) for answer in answers), return_exceptions=True
    )
    failed = [answer for answer, one in zip(answers, found, strict=True) if one is found[2]]
    assert failed == ["die"]
    assert isinstance(found[2], ScorerDefect)
    with pytest.raises(ScorerDefect, match=said):
        raise found[2]
    assert [one.value for one in found if not isinstance(one, BaseException)] == [1.0] * 4


async def test_a_function_that_hangs_is_left_with_its_process(written: Scorers) -> None:
    scorer = written(
        "if answer == 'hang':\n    while True: pass\nreturn Verdict(1.0, inputs={'pid': os.getpid()})"
    )
    first = await scorer.score("a", TRUTH)
    with pytest.raises(
        ScorerTimeout, match=r"returned no score within 1 s; it was at \S*mine\.py:8$"
    ) as raised:
        await scorer.score("hang", TRUTH, max_seconds=1)
    assert raised.value.is_certain
    second = await scorer.score("a", TRUTH)
    assert second.inputs["pid"] != first.inputs["pid"]
    until = time.monotonic() + PATIENCE
    while psutil.pid_exists(first.inputs["pid"]) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    assert not psutil.pid_exists(first.inputs["pid"])


@pytest.mark.parametrize(
    ("head", "block"),
    [
        # A regular expression keeps the interpreter lock: no other thread runs.
        pytest.param(
            "def mine(answer, truth):",
            "re.match(r'(a+)+$', 'a' * 60 + 'b')",
            id="interpreter lock",
        ),
        pytest.param(
            "async def mine(answer, truth):",
            "time.sleep(10_000)",
            id="event loop",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_function_that_blocks_its_process_is_ended_with_it(
    head: str, block: str, written: Scorers
) -> None:
    scorer = written(f"if answer == 'block':\n    {block}\nreturn 1.0", head=head)
    found = await asyncio.gather(
        *(scorer.score(answer, TRUTH, max_seconds=1) for answer in ("block", "a", "b")),
        return_exceptions=True,
    )
    assert isinstance(found[0], ScorerDefect)
    assert [one.value for one in found[1:] if not isinstance(one, BaseException)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("return truth.anwser", ScorerDefect, r"AttributeError: .*'anwser' \(\S*mine\.py:7\)"),
        ("return '1'", ScorerDefect, "returned str, not a number"),
        ("return Verdict(1.0, inputs={(1, 2): 3})", ScorerDefect, "cannot be stored: TypeError"),
        ("raise ConnectionRefusedError('nobody')", ScoringError, "ConnectionRefused"),
    ],
)
async def test_what_a_function_raises_is_told_as_it_is_here(
    body: str, error: type[Exception], said: str, written: Scorers
) -> None:
    with pytest.raises(ScoringError, match=said) as raised:
        await written(body).score("x", TRUTH)
    assert type(raised.value) is error


async def test_a_missing_configuration_is_told_as_it_is_here(written: Scorers) -> None:
    scorer = written(
        "from agentrl.errors import ConfigError\nraise ConfigError('no judge')",
        head="def mine(answer, truth, agent_config):",
    )
    with pytest.raises(ConfigError, match="no judge"):
        await scorer.score("x", TRUTH)


async def test_what_a_function_starts_has_the_variables_of_the_sampler(written: Scorers) -> None:
    scorer = written("return Verdict(1.0, inputs={'path': os.environ.get('PYTHONPATH')})")
    score = await scorer.score("x", TRUTH)
    assert score.inputs["path"] == os.environ.get("PYTHONPATH")


async def test_a_function_may_ask_to_run_in_the_sampler(written: Scorers) -> None:
    scorer = written("return Verdict(1.0, inputs={'pid': os.getpid()})", isolated=False)
    assert (await scorer.score("x", TRUTH)).inputs["pid"] == os.getpid()
