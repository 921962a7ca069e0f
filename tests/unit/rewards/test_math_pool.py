import asyncio
from pathlib import Path

import pytest

from agentrl.errors import ScoringError
from agentrl.rewards import GroundTruth, MCPScorerFactory
from agentrl.rewards.math_pool import MathPool


async def value(answer: str, right: str) -> float:
    scorer = MCPScorerFactory.get_scorer("math")
    return (await scorer.score(answer, GroundTruth(query="q", answer=right))).value


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        (r"\frac{1}{2}", "1/2", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("$x^2+2x+1$", "$(x+1)^2$", 1.0),
        ("1/3", "1/2", 0.0),
        ("no idea", "1/2", 0.0),
        (r"\boxed{4}", "4", 1.0),
        ("no idea", "no idea", 1.0),
        ("9" * 20_000, "4", 0.0),
    ],
)
async def test_math_compares_values(answer: str, right: str, expected: float) -> None:
    assert await value(answer, right) == expected


async def test_an_endless_comparison_ends_and_holds_nobody_up() -> None:
    pool = MathPool(num_workers=1, cpu_seconds=1.0)
    await pool.compare("1", ("2",))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    verdict = await pool.compare("(x+y+z)^{300}", ("2",))
    ticking.cancel()
    assert (verdict.value, verdict.detail) == (0.0, "comparison timed out after 1 s")
    assert ticks > 10
    assert (await pool.compare("2", ("2.0",))).value == 1.0
    pool.close()


HOSTILE = [
    "9^{9^{9^{9}}}",
    "10^{1000000000}",
    "1000000!",
    "9!!!!",
    "\\prod_{k=1}^{1000000000} k",
    "\\binom{1000000}{500000}",
    "9" * 9000,
    "(" * 4000 + "1" + ")" * 4000,
    "\\{" * 4000,
    "-" * 9000 + "1",
    "x" * 9000,
    "1," * 4000 + "1",
    "5 " + "m " * 4000,
    "1:" * 4000 + "1",
    "4\u0301" * 4000,
    "$" * 9000,
    "sqrt(" * 1800,
]


async def test_hostile_answers_are_wrong_at_once() -> None:
    pool = MathPool(num_workers=1, cpu_seconds=1.0)
    await pool.compare("1", ("2",))
    for hostile in HOSTILE:
        verdict = await pool.compare(hostile, ("2",))
        assert verdict.value == 0.0, hostile[:20]
        assert "timed out" not in verdict.detail, hostile[:20]
    pool.close()


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').mkdir('PATH')",
        "\\text{__import__('os').mkdir('PATH')}",
        "$__import__('os').mkdir('PATH')$",
        "1 + __import__('os').mkdir('PATH')",
        "x_{__import__('os').mkdir('PATH')}",
    ],
)
async def test_code_in_an_answer_does_not_run(code: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert await value(code.replace("PATH", str(made)), "2") == 0.0
    assert not made.exists()


async def test_a_worker_that_fails_gives_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    pool = MathPool()
    with pytest.raises(ScoringError, match="math worker"):
        await pool.compare("1", ("2",))
