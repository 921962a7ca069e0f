from typing import Any

import pytest

from agentrl.store import TrajectoryStore
from agentrl.store.views.learning_signal import damage_text

Document = dict[str, Any]


def steps(*numbers: int, loss: float = 0.5) -> list[dict[str, float]]:
    return [{"step": number, "loss": loss, "kl": 0.1} for number in numbers]


async def test_figures_come_back_in_order_and_as_asked_for(store: TrajectoryStore) -> None:
    for one in steps(1, 2, 10, 9):
        await store.figures.put_step("trainer", one)
    await store.figures.put_step("other", {"step": 3, "loss": 9.0})
    await store.figures.put_step("trainer", {"step": 2, "loss": 0.25})
    found = await store.figures.steps("trainer", ("loss",), after=1)
    assert found == [
        {"step": 2, "loss": 0.25},
        {"step": 9, "loss": 0.5},
        {"step": 10, "loss": 0.5},
    ]
    assert [one["step"] for one in await store.figures.last_steps("trainer", 2)] == [9, 10]
    assert await store.figures.step("trainer", 4) is None


async def test_a_resumed_trainer_forgets_lost_steps_and_adds_missing_ones(
    store: TrajectoryStore,
) -> None:
    for one in steps(1, 2, 4, 5):
        await store.figures.put_step("trainer", one)
    for version in (0, 5):
        await store.figures.put_evaluation("trainer", {"version": version, "reward_mean": 0.1})
    evaluations = [{"version": 0, "reward_mean": 0.1}]
    await store.figures.rewind("trainer", 3, steps(1, 2, 3), evaluations)
    assert [one["step"] for one in await store.figures.last_steps("trainer", 9)] == [1, 2, 3]
    assert [one["version"] for one in await store.figures.evaluations("trainer")] == [0]


def _eval(mean: float, low: float, high: float, call_share: float | None = None) -> Document:
    return {
        "reward_mean": mean,
        "total": {"low": low, "high": high},
        "call_share": call_share,
    }


@pytest.mark.parametrize(
    ("steps", "evaluations", "said"),
    [
        ([{"step": 1, "sampler_kl_k3": 0.09}], [], None),
        ([{"step": 2, "sampler_kl_k3": 0.24}], [], "sampler 0.24 at step 2 (healthy: below 0.01)"),
        ([{"step": n, "grad_norm": 0.2} for n in range(6)], [], None),
        (
            [{"step": n, "grad_norm": 0.2 if n < 6 else 3.0} for n in range(8)],
            [],
            "gradient norm 0.2 -> 3",
        ),
        ([], [_eval(0.4, 0.3, 0.5), _eval(0.3, 0.2, 0.4)], None),
        ([], [_eval(0.7, 0.6, 0.8), _eval(0.3, 0.2, 0.4)], "held-out reward 0.700 -> 0.300"),
        (
            [],
            [_eval(0.4, 0.3, 0.5, 1.0), _eval(0.3, 0.2, 0.4, 0.0)],
            "held-out rollouts that call a tool 100% -> 0%",
        ),
    ],
)
def test_a_policy_that_falls_apart_is_said_with_its_figures(
    steps: list[Document], evaluations: list[Document], said: str | None
) -> None:
    text = damage_text(steps, evaluations)
    assert text is None if said is None else said in (text or "")
