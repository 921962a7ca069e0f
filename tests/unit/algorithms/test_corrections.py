"""Corrections against plain loops in float64."""

import math
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest
import torch

from agentrl.algorithms.losses import (
    LossSettings,
    corrected,
    importance_correction,
    kl_penalty,
    policy_loss,
    proximal_logprobs,
    sequence_sums,
    weighted_sum,
)
from agentrl.errors import ConfigError
from agentrl.schema.formulas import CorrectionKind, CorrectionLevel, KLEstimator

RNG = np.random.default_rng(0)
MU = RNG.normal(-2.0, 0.5, 40)
PROXIMAL = MU + RNG.normal(0.0, 0.6, 40)
TURN_OF = np.repeat([3, 0, 7, 5], 10)
LOWER, UPPER = 0.4, 1.8


def tensor(values: Sequence[float] | np.ndarray, *, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def level_ratio(index: int, level: CorrectionLevel) -> float:
    logs = [p - m for p, m, t in zip(PROXIMAL, MU, TURN_OF, strict=True) if t == TURN_OF[index]]
    if level == "token":
        return math.exp(PROXIMAL[index] - MU[index])
    return math.exp(sum(logs) if level == "sequence" else sum(logs) / len(logs))


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("kind", ["none", "full", "tis", "icepop", "mis"])
@pytest.mark.parametrize("veto", [None, 0.35])
def test_corrections_match_plain_loops(
    kind: CorrectionKind, level: CorrectionLevel, veto: float | None
) -> None:
    found = importance_correction(
        tensor(PROXIMAL),
        tensor(MU),
        kind=kind,
        level=level,
        lower=LOWER,
        upper=UPPER,
        veto_threshold=veto,
        sequences=torch.from_numpy(TURN_OF),
    )
    for index in range(len(MU)):
        ratio = 1.0 if kind == "none" else level_ratio(index, level)
        keep = kind not in ("icepop", "mis") or LOWER <= ratio <= UPPER
        if veto is not None:
            rhos = np.exp(PROXIMAL - MU)[TURN_OF[index] == TURN_OF]
            keep = keep and not (rhos < veto).any()
        assert found.keep[index].item() is bool(keep)
        if keep:
            weight = min(ratio, UPPER) if kind in ("tis", "mis") else ratio
            assert found.weights[index].item() == pytest.approx(weight, rel=1e-12)


def test_the_samples_reach_both_sides_of_every_bound() -> None:
    for level in get_args(CorrectionLevel):
        ratios = [level_ratio(index, level) for index in range(len(MU))]
        assert min(ratios) < 1 < max(ratios)
    assert min(np.exp(PROXIMAL - MU)) < 0.35


def test_a_long_sequence_far_from_its_sampler_has_a_finite_weight() -> None:
    far = importance_correction(
        torch.zeros(100),
        torch.full((100,), -10.0),
        kind="full",
        level="sequence",
        sequences=torch.zeros(100, dtype=torch.int64),
    )
    assert far.weights.tolist() == pytest.approx([math.exp(20.0)] * 100, rel=1e-6)


def test_whole_sequences_need_their_index() -> None:
    with pytest.raises(ConfigError, match="turn of every target token"):
        importance_correction(tensor(PROXIMAL), tensor(MU), kind="mis", level="sequence")
    with pytest.raises(ConfigError, match="turn of every target token"):
        importance_correction(tensor(PROXIMAL), tensor(MU), kind="none", veto_threshold=0.1)


def test_proximal_logprobs_lie_between_sampler_and_policy() -> None:
    policy, behavior = tensor([-1.0, -1.0, -1.0], grad=True), tensor([-3.0, -3.0, -3.0])
    arguments = {"staleness": torch.tensor([0, 1, 3])}
    assert proximal_logprobs(policy, behavior, kind="behavior").tolist() == [-3.0] * 3
    assert proximal_logprobs(policy, behavior, kind="recompute").tolist() == [-1.0] * 3
    between = proximal_logprobs(policy, behavior, kind="loglinear", **arguments)
    assert between.tolist() == pytest.approx([-3.0, -2.0, -1.5])
    assert not between.requires_grad
    with pytest.raises(ConfigError, match="staleness"):
        proximal_logprobs(policy, behavior, kind="loglinear")


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    ],
)
def test_kl_estimates_and_their_gradients(
    kind: KLEstimator, value: Callable[[float], float], slope: Callable[[float], float]
) -> None:
    policy, reference = tensor([-1.0, -2.0, -0.5], grad=True), tensor([-1.5, -1.0, -0.5])
    penalty = kl_penalty(policy, reference, kind=kind)
    penalty.sum().backward()
    differences = (policy.detach() - reference).tolist()
    assert penalty.tolist() == pytest.approx([value(d) for d in differences], abs=1e-14)
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([slope(d) for d in differences], abs=1e-14)


@pytest.mark.parametrize("difference", [-19.9, 0.0, 20.0, 25.0, 400.0])
def test_far_above_the_reference_k3_still_pulls_with_slope_one(difference: float) -> None:
    policy = tensor([difference], grad=True)
    penalty = kl_penalty(policy, tensor([0.0]))
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(math.expm1(-difference) + difference, rel=1e-12)
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(-math.expm1(-difference), rel=1e-12)


def test_far_below_the_reference_k3_stays_finite_and_pulls_back() -> None:
    policy = tensor([-30.0, -800.0], grad=True)
    penalty = kl_penalty(policy, tensor([0.0, 0.0]))
    penalty.sum().backward()
    assert penalty.isfinite().all()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([1 - math.exp(20.0)] * 2)


def test_kl_estimates_agree_on_the_mean() -> None:
    torch.manual_seed(0)
    logits, other = torch.randn(2, 5, dtype=torch.float64)
    p, q = logits.log_softmax(0), other.log_softmax(0)
    exact = (p.exp() * (p - q)).sum().item()
    kinds: tuple[KLEstimator, ...] = ("k1", "k3")
    for kind in kinds:
        assert (p.exp() * kl_penalty(p, q, kind=kind)).sum().item() == pytest.approx(exact)


def decoupled_reference(
    policy: float, advantage: float, index: int, kind: CorrectionKind
) -> tuple[float, float]:
    """Loss and slope of one target token of decoupled PPO with a truncated or masked weight."""
    rho = math.exp(PROXIMAL[index] - MU[index])
    ratio = math.exp(policy - PROXIMAL[index])
    plain, bounded = ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage
    weight = min(rho, UPPER) if kind == "tis" else rho
    if kind == "icepop" and not LOWER <= rho <= UPPER:
        return 0.0, 0.0
    return -weight * min(plain, bounded), -weight * plain if plain <= bounded else 0.0


@pytest.mark.parametrize("kind", ["full", "tis", "icepop"])
def test_decoupled_ppo_matches_plain_loops_with_gradients(kind: CorrectionKind) -> None:
    policy_values = PROXIMAL + RNG.normal(0.0, 0.3, 40)
    advantages = RNG.normal(size=40)
    policy = tensor(policy_values, grad=True)
    losses = policy_loss(
        policy,
        tensor(MU),
        tensor(advantages),
        LossSettings(importance_weight_cap_ratio=1e6),
        proximal_logprobs=tensor(PROXIMAL),
    )
    correction = importance_correction(
        tensor(PROXIMAL), tensor(MU), kind=kind, lower=LOWER, upper=UPPER
    )
    losses = corrected(losses, correction)
    weighted_sum(losses, torch.ones(40)).backward()
    assert losses.ratio.tolist() == pytest.approx(np.exp(policy_values - MU).tolist())
    assert policy.grad is not None
    for index in range(40):
        loss, slope = decoupled_reference(policy_values[index], advantages[index], index, kind)
        if losses.keep[index]:
            assert losses.loss[index].item() == pytest.approx(loss, rel=1e-12, abs=1e-14)
        else:
            assert loss == 0.0
        assert policy.grad[index].item() == pytest.approx(slope, rel=1e-12, abs=1e-14)


def test_sequence_sums_of_nothing_are_nothing() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    assert sequence_sums(empty, torch.empty(0, dtype=torch.int64), mean=True).shape == (0,)
