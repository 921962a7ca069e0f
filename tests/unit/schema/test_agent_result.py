"""What an agent hands over is plain finite numbers before it goes anywhere."""

import itertools
from typing import Any

import numpy as np
import pytest

from agentrl import AgentResult


def test_text_and_nothing_are_answers_without_a_reward() -> None:
    assert AgentResult.of("7") == AgentResult("7")
    assert AgentResult.of(None) == AgentResult(None)


def test_the_numbers_of_numpy_become_plain_ones() -> None:
    given: dict[str, Any] = {
        "reward": np.float32(0.5),
        "step_rewards": np.array([0.25, -1.0]),
        "metrics": {"won": True, "moves": np.int64(3)},
    }
    result = AgentResult.of(AgentResult("7", **given))
    assert result == AgentResult("7", 0.5, (0.25, -1.0), {"won": 1.0, "moves": 3.0})
    assert type(result.reward) is float


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"answer": "7"}, "returned dict; it must return the answer as text, None, or an agent"),
        (AgentResult(7), "answer is a int, not a str"),  # type: ignore[arg-type]
        (AgentResult("7", reward=float("nan")), "reward is nan, not a finite number"),
        (AgentResult("7", reward="high"), "reward is a str"),  # type: ignore[arg-type]
        (AgentResult("7", step_rewards=[0.0, float("inf")]), r"step_rewards\[1\] is inf"),
        (AgentResult("7", step_rewards=None), "step_rewards is a NoneType"),  # type: ignore[arg-type]
        (AgentResult("7", metrics={"won": "yes"}), r"metrics\['won'\] is a str"),  # type: ignore[dict-item]
        ("x" * 1_000_001, "answer has 1,000,001 characters; the limit is 1,000,000"),
        (AgentResult("x" * 1_000_001), "answer has 1,000,001 characters"),
        (AgentResult("7", step_rewards=itertools.count()), "more than 10,000 step_rewards"),
        (
            AgentResult("7", metrics=dict.fromkeys(map(str, range(2000)), 1.0)),
            "more than 1,000 met",
        ),
        (AgentResult("7", metrics={"x" * 201: 1.0}), "the name of a metric has 201 characters"),
        (AgentResult("7", metrics=[1.0]), "metrics is a list, not a Mapping"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(given: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        AgentResult.of(given)
