"""A loss in a file of the user computes what a built-in one does, and reports its figures."""

from pathlib import Path

import pytest
import torch

from agentrl.algorithms.advantages import ADVANTAGES
from agentrl.algorithms.losses import LOSSES, LossInputs, LossSettings, TargetLosses, evaluated_loss
from agentrl.schema.formulas import ADVANTAGE_KINDS, LOSS_KINDS

OWN = Path(__file__).parents[4] / "examples/own_algorithm/built_in_losses.py"


def random_inputs(seed: int, settings: LossSettings) -> LossInputs:
    random = torch.Generator().manual_seed(seed)
    behavior = -3.0 * torch.rand(200, generator=random)
    policy = behavior + 0.6 * torch.randn(200, generator=random)
    return LossInputs(
        policy_logprobs=policy.requires_grad_(),
        behavior=behavior,
        proximal=policy.detach() + 0.3 * torch.randn(200, generator=random),
        advantages=torch.randn(200, generator=random),
        staleness=torch.randint(0, 3, (200,), generator=random),
        turns=torch.arange(200) // 20,
        records=torch.arange(200) // 40,
        settings=settings,
    )


def gradient(inputs: LossInputs, arguments: dict[str, float]) -> tuple[TargetLosses, torch.Tensor]:
    losses, _ = evaluated_loss(inputs, arguments)
    kept = torch.where(losses.keep, losses.loss, torch.zeros_like(losses.loss))
    return losses, torch.autograd.grad(kept.sum(), inputs.policy_logprobs)[0]


@pytest.mark.parametrize("kind", ["GRPO", "MINIRL", "CISPO"])
@pytest.mark.parametrize("seed", range(5))
def test_a_users_copy_of_a_loss_has_its_gradients_bit_for_bit(kind: str, seed: int) -> None:
    own = f"{OWN}:{kind.lower()}"
    truncation = 1.5 if kind == "MINIRL" else None
    settings = LossSettings(kind=kind, importance_weight_truncation=truncation)
    built_in = random_inputs(seed, settings)
    copied = random_inputs(seed, LossSettings(kind=own))
    expected, slopes = gradient(built_in, {})
    found, own_slopes = gradient(copied, {"truncation": 1.5} if truncation else {})
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.keep, expected.keep)
    assert torch.equal(found.ratio, expected.ratio)
    assert torch.equal(own_slopes, slopes)
    assert slopes.abs().sum() > 0
    assert expected.clipped.any()


def test_figures_of_a_loss_are_returned_with_it() -> None:
    inputs = random_inputs(0, LossSettings(kind=f"{OWN}:cispo"))
    assert float(evaluated_loss(inputs, {}).metrics["weight"].max()) == pytest.approx(1.3)


def test_every_name_of_a_flag_is_registered() -> None:
    for kind in LOSS_KINDS:
        assert callable(LOSSES.formula(kind))
    for estimator in ADVANTAGE_KINDS:
        assert callable(ADVANTAGES.formula(estimator))
