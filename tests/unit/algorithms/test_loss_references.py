"""Every loss against an independent reference in plain float64 loops, with its gradient.

The references compute the objective of the papers with `math` alone, token by token; gradients are
central differences of the reference, with what the papers hold fixed (stop-gradients) held fixed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms.advantages import group_advantages, step_normalized
from agentrl.algorithms.losses import (
    LossSettings,
    corrected,
    cross_entropy,
    importance_correction,
    kl_penalty,
    policy_loss,
    proximal_logprobs,
    weighted_sum,
)
from agentrl.algorithms.reductions import Reduction, target_weights
from agentrl.schema.formulas import (
    AdvantageKind,
    CorrectionKind,
    CorrectionLevel,
    KLEstimator,
    ProximalKind,
)

RNG = np.random.default_rng(3)
NUM_TARGETS = 60
TURN_OF = np.repeat(np.arange(6), 10)
RECORD_OF = np.repeat([0, 0, 1, 2, 2, 2], 10)
MU = RNG.normal(-2.0, 0.5, NUM_TARGETS)
PI = MU + RNG.normal(0.0, 0.35, NUM_TARGETS)
ADVANTAGES = np.repeat(RNG.normal(0.0, 1.0, 6), 10)
STALENESS = np.repeat([0, 1, 3, 0, 2, 5], 10)
STEP = 1e-6
Objective = Callable[[np.ndarray], float]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def clipped_objective(
    ratio: float, a: float, low: float, high: float, dual: float | None = None
) -> float:
    value = min(ratio * a, clip(ratio, low, high) * a)
    return max(value, dual * a) if dual is not None and a < 0 else value


class GRPO:
    knobs: dict[str, Any] = {}
    low, high = 0.8, 1.3
    dual: float | None = None
    proximal = MU
    """Log probabilities that the ratio divides by."""

    def fixed(self, _t: int) -> float:
        """What the stop-gradients hold, from the point at which the gradient is taken."""
        return 1.0

    def ratio(self, log_pi: float, t: int) -> float:
        return math.exp(log_pi - self.proximal[t])

    def loss(self, log_pi: float, t: int, _fixed: float) -> float:
        return -clipped_objective(
            self.ratio(log_pi, t), ADVANTAGES[t], self.low, self.high, self.dual
        )


class DAPO(GRPO):
    knobs = {"epsilon_higher": 0.08}
    high = 1.28


class DualClip(GRPO):
    knobs = {"dual_clip": 1.4}
    dual = 1.4


class CEGPPO(GRPO):
    """Clipped tokens keep the gradient beta * bound * A * d log pi (2509.20712)."""

    knobs = {"beta1": 0.5, "beta2": 0.75}

    def fixed(self, t: int) -> float:
        return self.ratio(PI[t], t)

    def loss(self, log_pi: float, t: int, fixed: float) -> float:
        a, unit = float(ADVANTAGES[t]), self.ratio(log_pi, t) / fixed
        if fixed < self.low and a < 0:
            return -0.5 * self.low * unit * a
        if fixed > self.high and a > 0:
            return -0.75 * self.high * unit * a
        return super().loss(log_pi, t, fixed)


class GSPO(GRPO):
    """The token form: sg(s) * pi / sg(pi), s = exp of the mean log ratio of the turn."""

    knobs = {"kind": "GSPO"}

    def fixed(self, t: int) -> float:
        mates = [k for k in range(NUM_TARGETS) if TURN_OF[k] == TURN_OF[t]]
        logs = [PI[k] - self.proximal[k] for k in mates]
        return math.exp(sum(logs) / len(logs))

    def loss(self, log_pi: float, t: int, fixed: float) -> float:
        ratio = fixed * math.exp(log_pi - PI[t])
        return -clipped_objective(ratio, ADVANTAGES[t], self.low, self.high)


class CISPO(GRPO):
    knobs = {"kind": "CISPO", "epsilon_higher": 0.05}
    high = 1.25

    def fixed(self, t: int) -> float:
        return min(self.ratio(PI[t], t), self.high)

    def loss(self, log_pi: float, t: int, fixed: float) -> float:
        return -fixed * float(ADVANTAGES[t]) * log_pi


class MINIRL(GRPO):
    """The seed's form: the untruncated weight."""

    knobs = {"kind": "MINIRL"}
    truncation = math.inf

    def fixed(self, t: int) -> float:
        return min(math.exp(PI[t] - MU[t]), self.truncation)

    def loss(self, log_pi: float, t: int, fixed: float) -> float:
        return -fixed * float(ADVANTAGES[t]) * log_pi


class PaperMINIRL(MINIRL):
    """2512.01374: weight truncated (here where it matters), drop range = clip range."""

    knobs = {
        "kind": "MINIRL",
        "importance_weight_truncation": 1.15,
        "epsilon_higher": 0.07,
        "strict_in_bound": True,
    }
    truncation = 1.15
    drop = (0.8, 1.27)


class REINFORCE(GRPO):
    knobs = {"kind": "REINFORCE"}

    def loss(self, log_pi: float, t: int, _fixed: float) -> float:
        return -float(ADVANTAGES[t]) * log_pi


class Decayed(GRPO):
    """The drop range narrows by exp(-staleness * decay)."""

    knobs = {"out_of_date_decay": 0.4, "importance_weight_cap_ratio": 2.0}

    def drop_range(self, t: int) -> tuple[float, float]:
        k = math.exp(-0.4 * STALENESS[t])
        return 1 - 0.2 * 2 * k, 1 + 0.3 * 2 * k


REFERENCES = [GRPO, DAPO, DualClip, CEGPPO, GSPO, CISPO, MINIRL, PaperMINIRL, REINFORCE, Decayed]


def kept(reference: GRPO, t: int) -> bool:
    if isinstance(reference, GSPO | CISPO | REINFORCE):
        return True  # they have no hard drop range
    low = 1 - 0.2 * 4
    if isinstance(reference, Decayed):
        low, high = reference.drop_range(t)
    elif isinstance(reference, PaperMINIRL):
        low, high = reference.drop
    else:
        width = 0.2 + reference.knobs.get("epsilon_higher", 0.1)
        high = 1 + width * 4
    ratio = math.exp(PI[t] - MU[t])
    return not ((ratio > high and ADVANTAGES[t] > 0) or (ratio < low and ADVANTAGES[t] < 0))


def expected(reference: GRPO, weights: np.ndarray) -> tuple[float, np.ndarray]:
    total, gradient = 0.0, np.zeros(NUM_TARGETS)
    for t in range(NUM_TARGETS):
        if not kept(reference, t):
            continue
        fixed = reference.fixed(t)
        total += weights[t] * reference.loss(PI[t], t, fixed)
        up, down = (reference.loss(PI[t] + d, t, fixed) for d in (STEP, -STEP))
        gradient[t] = weights[t] * (up - down) / (2 * STEP)
    return total, gradient


def tensor(values: Sequence[float] | np.ndarray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("reference", REFERENCES)
def test_loss_and_gradient_are_those_of_the_reference(
    reference: type[GRPO], kind: Reduction
) -> None:
    weights = target_weights(RECORD_OF, kind=kind)
    log_pi = tensor(PI).requires_grad_()
    losses = policy_loss(
        log_pi,
        tensor(MU),
        tensor(ADVANTAGES),
        LossSettings(**reference.knobs),
        sequences=torch.from_numpy(TURN_OF),
        staleness=torch.from_numpy(STALENESS),
    )
    loss = weighted_sum(losses, tensor(weights))
    loss.backward()
    total, gradient = expected(reference(), weights)
    assert loss.item() == pytest.approx(total, rel=1e-12)
    assert log_pi.grad is not None
    np.testing.assert_allclose(log_pi.grad.numpy(), gradient, atol=1e-9)
    assert losses.keep.tolist() == [kept(reference(), t) for t in range(NUM_TARGETS)]


def test_the_targets_reach_every_branch_of_the_references() -> None:
    ratios = np.exp(PI - MU)
    for sign in (1, -1):
        of_sign = ratios[np.sign(ADVANTAGES) == sign]
        assert of_sign.min() < 0.8
        assert of_sign.max() > 1.4
    dropped = {r.__name__: sum(not kept(r(), t) for t in range(NUM_TARGETS)) for r in REFERENCES}
    assert dropped["PaperMINIRL"] > dropped["Decayed"] > 0


@pytest.mark.parametrize("ratio", [GRPO, GSPO, CISPO])
@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
@pytest.mark.parametrize("kind", ["full", "tis", "icepop", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("veto", [None, 0.62])
def test_decoupled_objectives_are_those_of_the_reference(
    ratio: type[GRPO],
    proximal: ProximalKind,
    kind: CorrectionKind,
    level: CorrectionLevel,
    veto: float | None,
) -> None:
    """The loss with r = pi / pi_p, times rho = pi_p / mu, bounded or masked."""
    reference = ratio()
    reference.proximal = prox = (
        PI if proximal == "recompute" else MU + STALENESS / (STALENESS + 1.0) * (PI - MU)
    )
    low, high = 0.7, 1.5
    total, gradient = 0.0, np.zeros(NUM_TARGETS)
    for t in range(NUM_TARGETS):
        mates = [k for k in range(NUM_TARGETS) if TURN_OF[k] == TURN_OF[t]]
        logs = [prox[k] - MU[k] for k in mates]
        log_rho = {
            "token": prox[t] - MU[t],
            "sequence": sum(logs),
            "sequence_mean": sum(logs) / len(logs),
        }[level]
        rho = math.exp(log_rho)
        if kind in ("icepop", "mis") and not low <= rho <= high:
            continue
        if veto is not None and any(math.exp(value) < veto for value in logs):
            continue
        rho = min(rho, high) if kind in ("tis", "mis") else rho

        fixed, share = reference.fixed(t), rho / NUM_TARGETS
        total += share * reference.loss(PI[t], t, fixed)
        up, down = (reference.loss(PI[t] + d, t, fixed) for d in (STEP, -STEP))
        gradient[t] = share * (up - down) / (2 * STEP)
    log_pi, mu, turns = tensor(PI).requires_grad_(), tensor(MU), torch.from_numpy(TURN_OF)
    own = proximal_logprobs(log_pi, mu, kind=proximal, staleness=torch.from_numpy(STALENESS))
    losses = policy_loss(
        log_pi,
        mu,
        tensor(ADVANTAGES),
        LossSettings(importance_weight_cap_ratio=1e9, **reference.knobs),
        sequences=turns,
        proximal_logprobs=own,
    )
    correction = importance_correction(
        own, mu, kind=kind, level=level, lower=low, upper=high, veto_threshold=veto, sequences=turns
    )
    loss_value = weighted_sum(
        corrected(losses, correction), tensor([1 / NUM_TARGETS] * NUM_TARGETS)
    )
    loss_value.backward()
    assert loss_value.item() == pytest.approx(total, rel=1e-11, abs=1e-14)
    assert log_pi.grad is not None
    np.testing.assert_allclose(log_pi.grad.numpy(), gradient, atol=1e-9)


def slopes(objective: Objective, at: np.ndarray = PI) -> np.ndarray:
    """Central differences of an objective of all log pi."""
    found = np.zeros(NUM_TARGETS)
    for t in range(NUM_TARGETS):
        up, down = at.copy(), at.copy()
        up[t] += STEP
        down[t] -= STEP
        found[t] = (objective(up) - objective(down)) / (2 * STEP)
    return found


def assert_objective(
    objective: Objective,
    weights: np.ndarray,
    advantages: np.ndarray = ADVANTAGES,
    **knobs: Any,
) -> None:
    """Loss and gradient are those of an objective that is to be maximised."""
    log_pi = tensor(PI).requires_grad_()
    losses = policy_loss(
        log_pi,
        tensor(MU),
        tensor(advantages),
        LossSettings(importance_weight_cap_ratio=1e9, **knobs),
        sequences=torch.from_numpy(TURN_OF),
    )
    loss = weighted_sum(losses, tensor(weights))
    loss.backward()
    assert loss.item() == pytest.approx(-objective(PI), rel=1e-12)
    assert log_pi.grad is not None
    np.testing.assert_allclose(log_pi.grad.numpy(), -slopes(objective), atol=1e-9)


def test_gspo_is_the_clipped_ratio_of_whole_sequences() -> None:
    """J = 1/G sum_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(y_i) / mu(y_i))^(1 / |y_i|)."""

    def objective(log_pi: np.ndarray) -> float:
        total = 0.0
        for turn in range(6):
            of_turn = turn == TURN_OF
            s = math.exp((log_pi - MU)[of_turn].mean())
            total += clipped_objective(s, ADVANTAGES[of_turn][0], 0.95, 1.02) / 6
        return total

    bounds: dict[str, Any] = {"epsilon": 0.05, "epsilon_higher": -0.03}
    assert_objective(
        objective, target_weights(TURN_OF, kind="sequence_mean"), kind="GSPO", **bounds
    )


SCORES = np.array([1.0, 0.0, 1.0])
"""Of the records that the target tokens belong to."""


def test_dr_grpo_is_that_of_the_paper() -> None:
    """J = 1/(G L) sum_i sum_t min(r A_i, clip(r) A_i) with A_i = R_i - mean(R)."""
    length = 40
    advantages = (SCORES - SCORES.sum() / 3)[RECORD_OF]

    def objective(log_pi: np.ndarray) -> float:
        values = [
            clipped_objective(math.exp(log_pi[t] - MU[t]), advantages[t], 0.8, 1.3)
            for t in range(NUM_TARGETS)
        ]
        return math.fsum(values) / (3 * length)

    own = group_advantages(SCORES.tolist(), kind="group_mean")[RECORD_OF]
    weights = target_weights(RECORD_OF, kind="sequence_sum", normalizer_length=length)
    assert_objective(objective, weights, own)


def test_grpo_is_that_of_the_paper() -> None:
    """J = 1/G sum_i 1/|y_i| sum_t min(r A_i, clip(r) A_i) with A_i = (R_i - mean) / std."""
    deviation = math.sqrt(sum((s - 2 / 3) ** 2 for s in SCORES) / 3)
    advantages = ((SCORES - 2 / 3) / deviation)[RECORD_OF]

    def objective(log_pi: np.ndarray) -> float:
        total = 0.0
        for t in range(NUM_TARGETS):
            value = clipped_objective(math.exp(log_pi[t] - MU[t]), advantages[t], 0.8, 1.3)
            total += value / (3 * (RECORD_OF[t] == RECORD_OF).sum())
        return total

    own = group_advantages(SCORES.tolist(), kind="group_std")[RECORD_OF]
    assert_objective(objective, target_weights(RECORD_OF, kind="sequence_mean"), own)


@pytest.mark.parametrize("estimator", ["leave_one_out", "reinforce_plus_plus"])
def test_reinforce_with_baselines_is_that_of_the_papers(estimator: AdvantageKind) -> None:
    """J = 1/N sum_t A log pi: RLOO's A = R_i - mean of the others; REINFORCE++ normalizes all."""
    others = [(SCORES.sum() - score) / 2 for score in SCORES]
    advantages = (SCORES - others)[RECORD_OF]
    own = group_advantages(SCORES.tolist(), kind=estimator)
    if estimator == "reinforce_plus_plus":
        centered = (SCORES - SCORES.sum() / 3)[RECORD_OF]
        mean = math.fsum(centered) / NUM_TARGETS
        variance = math.fsum((a - mean) ** 2 for a in centered) / NUM_TARGETS
        advantages = (centered - mean) / math.sqrt(variance)
        own = step_normalized(own, np.bincount(RECORD_OF))

    def objective(log_pi: np.ndarray) -> float:
        return math.fsum(advantages * log_pi) / NUM_TARGETS

    weights = target_weights(RECORD_OF, kind="token_mean")
    assert_objective(objective, weights, own[RECORD_OF], kind="REINFORCE")


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_a_kl_penalty_is_that_of_the_reference(estimate: KLEstimator) -> None:
    """The loss gets beta * sum of weight * estimate, with d = log pi - log reference."""
    reference = PI + RNG.normal(0.0, 0.3, NUM_TARGETS)
    weights = target_weights(RECORD_OF, kind="sequence_mean")

    def objective(log_pi: np.ndarray) -> float:
        d = log_pi - reference
        values = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[estimate]
        return math.fsum(weights * values)

    log_pi = tensor(PI).requires_grad_()
    penalty = (tensor(weights) * kl_penalty(log_pi, tensor(reference), kind=estimate)).sum()
    penalty.backward()
    assert penalty.item() == pytest.approx(objective(PI), rel=1e-12)
    assert log_pi.grad is not None
    np.testing.assert_allclose(log_pi.grad.numpy(), slopes(objective), atol=1e-9)


def test_cross_entropy_is_that_of_the_reference() -> None:
    weights = target_weights(RECORD_OF, kind="sequence_mean")
    log_pi = tensor(PI).requires_grad_()
    loss = weighted_sum(cross_entropy(log_pi), tensor(weights))
    loss.backward()
    assert loss.item() == pytest.approx(-math.fsum(weights * PI), rel=1e-13)
    assert log_pi.grad is not None
    np.testing.assert_allclose(log_pi.grad.numpy(), -weights, rtol=1e-15)
