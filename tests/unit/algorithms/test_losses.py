import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from agentrl.algorithms import policy_loss
from agentrl.algorithms.losses import (
    LossSettings,
    TargetLosses,
    cross_entropy,
    weighted_sum,
)
from agentrl.errors import ConfigError
from agentrl.schema.formulas import LOSS_KINDS, LossKind


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    behavior: float = -2.0,
    sequences: torch.Tensor | None = None,
    staleness: torch.Tensor | None = None,
    **knobs: Any,
) -> tuple[TargetLosses, torch.Tensor]:
    """Losses and d(sum of losses)/d(log pi) at given ratios."""
    mu = torch.full((len(ratios),), behavior, dtype=torch.float64)
    logprobs = (tensor(*ratios).log() + mu).requires_grad_()
    losses = policy_loss(
        logprobs,
        mu,
        tensor(*advantages),
        LossSettings(**knobs),
        sequences=sequences,
        staleness=staleness,
    )
    losses.loss.sum().backward()
    assert logprobs.grad is not None
    return losses, logprobs.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.2, 2.0, -2.4, -2.4, False),
        (1.5, 2.0, -2.6, 0.0, True),  # clip at 1.3
        (0.5, 2.0, -1.0, -1.0, False),  # pulled back up
        (1.0, -2.0, 2.0, 2.0, False),
        (0.5, -2.0, 1.6, 0.0, True),  # clip at 0.8
        (1.5, -2.0, 3.0, 3.0, False),  # pulled back down
        (1.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_grpo_by_hand(
    ratio: float, advantage: float, loss: float, slope: float, clipped: bool
) -> None:
    losses, grad = run([ratio], [advantage])
    assert losses.loss.item() == pytest.approx(loss)
    assert grad.item() == pytest.approx(slope)
    assert losses.clipped.item() is clipped
    assert losses.ratio.item() == pytest.approx(ratio)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_gradient_raises_good_tokens_and_lowers_bad_ones(kind: LossKind) -> None:
    _, grad = run([1.05, 1.05], [1.5, -1.5], kind=kind, sequences=torch.tensor([0, 1]))
    assert grad[0] < 0 < grad[1]


@pytest.mark.parametrize(
    ("ratio", "advantage", "kept"),
    [
        (2.19, 1.0, True),
        (2.21, 1.0, False),
        (2.21, -1.0, True),
        (0.21, -1.0, True),
        (0.19, -1.0, False),
        (0.19, 1.0, True),
    ],
)
def test_drop_range_is_sign_aware(ratio: float, advantage: float, kept: bool) -> None:
    assert run([ratio], [advantage])[0].keep.item() is kept


def test_strict_bound_drops_where_clipping_starts() -> None:
    losses, _ = run([1.29, 1.31, 0.81, 0.79], [1.0, 1.0, -1.0, -1.0], strict_in_bound=True)
    assert losses.keep.tolist() == [True, False, True, False]


def test_staleness_narrows_the_drop_range() -> None:
    # k = exp(-2 * 0.5) = 0.3679: upper bound 1 + 0.3 * 4 * k = 1.4415.
    edge = 1 + 0.3 * 4 * math.exp(-1.0)
    losses, _ = run(
        [edge - 1e-6, edge + 1e-6, edge + 1e-6, 2.3],
        [1.0, 1.0, 1.0, 1.0],
        out_of_date_decay=0.5,
        staleness=torch.tensor([2, 2, 0, -2]),  # a token of a later version widens nothing
    )
    assert losses.keep.tolist() == [True, False, True, False]


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_only_losses_with_a_drop_range_drop(kind: LossKind) -> None:
    losses, _ = run([9.0, 0.05], [1.0, -1.0], kind=kind, sequences=torch.arange(2))
    assert losses.keep.tolist() == [kind not in ("GRPO", "MINIRL")] * 2


@pytest.mark.parametrize("kind", ["GRPO", "MINIRL"])
def test_a_cap_of_zero_is_no_drop_range(kind: LossKind) -> None:
    losses, _ = run([9.0, 0.05], [1.0, -1.0], kind=kind, importance_weight_cap_ratio=0.0)
    assert losses.keep.all()


def test_the_drop_range_is_around_the_sampler_whatever_the_proximal_policy() -> None:
    policy = tensor(math.log(1.5), math.log(3.0))
    near, far = tensor(math.log(1.4), math.log(2.9)), tensor(math.log(0.2), math.log(0.2))
    for proximal in (near, far):
        losses = policy_loss(policy, tensor(0.0, 0.0), tensor(1.0, 1.0), proximal_logprobs=proximal)
        assert losses.keep.tolist() == [True, False]


def test_decay_without_staleness_is_refused() -> None:
    with pytest.raises(ConfigError, match="staleness"):
        run([1.0], [1.0], out_of_date_decay=0.5)


def test_betas_give_clipped_targets_a_bounded_gradient() -> None:
    losses, grad = run([0.5, 1.5, 1.5, 0.5], [-2.0, 2.0, -2.0, 2.0], beta1=0.5, beta2=0.25)
    # below: -beta1 * 0.8 * A; above: -beta2 * 1.3 * A; the rest as in GRPO.
    assert grad.tolist() == pytest.approx([0.8, -0.65, 3.0, -1.0])
    assert losses.loss.tolist() == pytest.approx([0.8, -0.65, 3.0, -1.0])
    assert losses.clipped.tolist() == [True, True, False, False]


def test_minirl_weighs_by_the_ratio_without_clipping() -> None:
    losses, grad = run([2.0, 0.5], [1.0, -1.0], kind="MINIRL")
    assert grad.tolist() == pytest.approx([-2.0, 0.5])
    log_pi = [-2.0 + math.log(2.0), -2.0 + math.log(0.5)]
    assert losses.loss.tolist() == pytest.approx([-2.0 * log_pi[0], 0.5 * log_pi[1]])
    assert not losses.clipped.any()


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    losses, grad = run([3.0, 0.5], [1.0, 1.0], kind="CISPO")
    assert grad.tolist() == pytest.approx([-1.3, -0.5])
    assert losses.clipped.tolist() == [True, False]


def test_reinforce_ignores_the_ratio() -> None:
    assert run([3.0, 0.5], [1.0, -1.0], kind="REINFORCE")[1].tolist() == pytest.approx([-1.0, 1.0])


def test_gspo_uses_the_geometric_mean_of_its_turn() -> None:
    turns = torch.tensor([0, 2, 0])
    losses, grad = run([1.1, 1.0, 0.9], [1.0, 1.0, 1.0], kind="GSPO", sequences=turns)
    mean = math.sqrt(1.1 * 0.9)
    assert grad.tolist() == pytest.approx([-mean, -1.0, -mean])
    assert losses.loss.tolist() == pytest.approx([-mean, -1.0, -mean])


def test_gspo_clips_whole_turns() -> None:
    turns = torch.tensor([0, 0])
    losses, grad = run([2.0, 1.0], [1.0, 1.0], kind="GSPO", sequences=turns)
    assert losses.clipped.tolist() == [True, True]
    assert grad.tolist() == [0.0, 0.0]


def test_gspo_without_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="turn of every target token"):
        run([1.0], [1.0], kind="GSPO")


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_no_targets_give_a_loss_of_zero_with_a_gradient(kind: LossKind) -> None:
    empty = torch.empty(0, dtype=torch.float64, requires_grad=True)
    none = torch.empty(0)
    losses = policy_loss(
        empty, none, none, LossSettings(kind=kind), sequences=torch.empty(0, dtype=torch.int64)
    )
    loss = weighted_sum(losses, none)
    loss.backward()
    assert loss.item() == 0.0


def test_dropped_targets_weigh_nothing_even_if_not_finite() -> None:
    losses, _ = run([3.0, 1.0], [1.0, 1.0])
    spoiled = losses._replace(loss=losses.loss * tensor(float("inf"), 1.0))
    assert weighted_sum(spoiled, tensor(0.5, 0.5)).item() == pytest.approx(-0.5)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_absurd_ratios_stay_finite(kind: LossKind) -> None:
    logprobs = torch.tensor([-0.1, -500.0, -0.1, -0.1], requires_grad=True)
    behavior = torch.tensor([-500.0, -0.1, -float("inf"), -0.1])
    losses = policy_loss(
        logprobs,
        behavior,
        torch.tensor([1.0, -1.0, 1.0, 1.0]),
        LossSettings(kind=kind),
        sequences=torch.arange(4),
    )
    assert losses.keep.tolist() == [kind not in ("GRPO", "MINIRL")] * 3 + [True]
    loss = weighted_sum(losses, torch.full((4,), 0.25))
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_unknown_loss_names_the_supported_ones() -> None:
    with pytest.raises(ConfigError, match="GRPO, MINIRL, GSPO, CISPO, REINFORCE"):
        run([1.0], [1.0], kind="PPO2")


def test_kind_is_case_insensitive() -> None:
    assert run([1.0], [1.0], kind="grpo")[0].loss.item() == -1.0


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        policy_loss(tensor(0.0), tensor(0.0), tensor(1.0, 2.0))


def test_cross_entropy_is_the_negative_logprob() -> None:
    logprobs = tensor(-1.5, -0.5).requires_grad_()
    losses = cross_entropy(logprobs)
    weighted_sum(losses, tensor(0.25, 0.75)).backward()
    assert losses.loss.tolist() == [1.5, 0.5]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.25, -0.75]
    assert losses.keep.all()
    assert not losses.clipped.any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (4.0, -2.0, 6.0, 0.0, True),  # bounded by 3 * |A|
        (2.5, -2.0, 5.0, 5.0, False),
        (0.5, -2.0, 1.6, 0.0, True),  # the ordinary clip
        (4.0, 2.0, -2.6, 0.0, True),
        (1.1, 2.0, -2.2, -2.2, False),
    ],
)
def test_dual_clip_bounds_bad_tokens(
    ratio: float, advantage: float, loss: float, slope: float, clipped: bool
) -> None:
    losses, grad = run([ratio], [advantage], dual_clip=3.0)
    assert losses.loss.item() == pytest.approx(loss)
    assert grad.item() == pytest.approx(slope)
    assert losses.clipped.item() is clipped


def test_minirl_of_the_paper_truncates_and_drops() -> None:
    paper: dict[str, Any] = {"epsilon": 0.2, "epsilon_higher": 0.07, "strict_in_bound": True}
    losses, grad = run(
        [6.0, 1.2, 0.7, 1.28, 0.79],
        [-1.0, 1.0, 1.0, 1.0, -1.0],
        kind="MINIRL",
        importance_weight_truncation=5.0,
        **paper,
    )
    assert grad.tolist() == pytest.approx([5.0, -1.2, -0.7, -1.28, 0.79])
    assert losses.keep.tolist() == [True, True, True, False, False]
    assert losses.clipped.tolist() == [True, False, False, False, False]


def test_clipping_is_around_the_proximal_policy() -> None:
    policy = tensor(math.log(1.5), math.log(1.5)).requires_grad_()
    losses = policy_loss(
        policy, tensor(0.0, 0.0), tensor(1.0, 1.0), proximal_logprobs=tensor(0.0, math.log(1.4))
    )
    losses.loss.sum().backward()
    assert losses.clipped.tolist() == [True, False]
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([0.0, -1.5 / 1.4])
    assert losses.ratio.tolist() == pytest.approx([1.5, 1.5])
