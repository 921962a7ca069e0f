"""The user's scorers judge a right answer before a run starts."""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.config.loading import load_config
from agentrl.config.sections import DataSection
from agentrl.datasets.question_files import QuestionFile
from agentrl.errors import ConfigError
from agentrl.launcher.checks import scorer_trial
from agentrl.launcher.checks.scorer_trial import try_scorers
from agentrl.rewards import GroundTruth, MCPScorerFactory, load_scorer_module
from agentrl.rewards.factory import ScoringFunction


@pytest.fixture(autouse=True)
def _scorers_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MCPScorerFactory, "_scorers", dict(MCPScorerFactory._scorers))


async def tried(folder: Path, function: ScoringFunction, **traits: Any) -> list[str]:
    MCPScorerFactory.register_scorer("mine", function, **traits)
    path = folder / "q.jsonl"
    lines = [
        {"id": "a", "query": "Q", "answer": 1, "scorer": "exact"},
        {"id": "b", "query": "Q", "scorer": "mine"},
        {"id": "c", "query": "Q", "answer": 6, "scorer": "mine"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    with QuestionFile(path, DataSection()) as questions:
        return await try_scorers(load_config({}), path, questions)


def misspelled(answer: str, truth: GroundTruth) -> float:
    return float(answer == truth.anwser)  # type: ignore[attr-defined]


async def of_text(answer: str, truth: GroundTruth) -> str:
    return answer


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            misspelled,
            r"'mine' failed: AttributeError: .*'anwser' \(.*test_scorer_trial\.py:\d+\); it",
        ),
        (
            of_text,
            "'mine' returned str, not a number; it was called with the correct answer '6' of "
            "question 'c'",
        ),
        (lambda answer, truth: None, "'mine' returned NoneType, not a number"),
    ],
)
async def test_a_scorer_that_gives_no_number_is_refused(
    function: ScoringFunction, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        await tried(tmp_path, function)


async def test_a_scorer_that_belongs_to_no_module_is_tried(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'mine' returned GroundTruth, not"):
        await tried(tmp_path, {}.setdefault)


async def test_a_scorer_is_called_once_with_the_right_answer(tmp_path: Path) -> None:
    calls = list[tuple[str, Any]]()

    def noted(answer: str, truth: GroundTruth) -> float:
        calls.append((answer, truth.answer))
        return 1.0

    assert await tried(tmp_path, noted) == []
    assert calls == [("6", 6)]


async def test_a_scorer_whose_service_is_away_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(answer: str, truth: GroundTruth) -> float:
        raise ConnectionRefusedError("nobody there")

    (note,) = await tried(tmp_path, away)
    assert note.startswith(
        "scorer 'mine' could not be tested: scorer 'mine' failed: ConnectionRefused"
    )
    monkeypatch.setattr(scorer_trial, "TRIAL_SECONDS", 0.01)

    async def endless(answer: str, truth: GroundTruth) -> float:
        await asyncio.Event().wait()
        return 1.0

    (note,) = await tried(tmp_path, endless)
    assert note.startswith("scorer 'mine' could not be tested: ")
    # The scorer's own limit and the trial's around it may pass in one round of a busy loop.
    assert note.endswith("no score within 0.01 s")


async def test_scorers_that_ask_models_or_compare_tries_are_not_called(tmp_path: Path) -> None:
    def asks(answer: str, truth: GroundTruth, agent_config: Any) -> float:
        raise AssertionError("it was called")

    assert await tried(tmp_path, asks) == []
    assert await tried(tmp_path, misspelled, sees_group=True) == []


async def test_nothing_is_left_of_the_trial(tmp_path: Path) -> None:
    module = tmp_path / "scorers.py"
    module.write_text(
        "from agentrl.rewards import MCPScorerFactory\n"
        "MCPScorerFactory.register_scorer('filed', lambda answer, truth: 1.0)\n"
    )
    load_scorer_module(module)
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"query": "Q", "answer": 1, "scorer": "filed"}))
    before = psutil.Process().children(recursive=True)
    with QuestionFile(path, DataSection()) as questions:
        assert await try_scorers(load_config({}), path, questions) == []
    assert psutil.Process().children(recursive=True) == before
