"""Policy losses and their corrections, unreduced, one value per target token: arrays in, arrays out.

Notation: mu = behavior policy (the sampler), pi = policy in training, r = pi/mu, A = advantage, sg
= stop-gradient. A target token is a sampled token of one turn; if several records sampled the same
token, each has its own target token. `agentrl.algorithms.reductions` holds the weights: the scalar
loss is `sum(weights * where(keep, loss, 0))` over the whole optimizer step.

The hard drop range is AgentRL's; of the papers, only MiniRL's has one. The other losses
already bound or ignore the ratio, and an additional range would make them different losses.

Corrections are for samples that do not come exactly from the trained policy: pi_p = proximal policy
(the trainer's at the start of the step) with rho = pi_p/mu. Two things make rho differ from 1: engine
and trainer compute the same weights differently, and the sample may be some versions old. No
correction carries a gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from agentrl.algorithms.formula_registry import FormulaRegistry
from agentrl.errors import ConfigError, UserCodeError
from agentrl.schema.formulas import (
    CorrectionKind,
    CorrectionLevel,
    KLEstimator,
    ProximalKind,
)

_WITH_DROP_RANGE = ("GRPO", "MINIRL")
MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this magnitude, in losses and corrections: e^20 is far outside every useful
bound, and an infinite ratio would turn the gradient of a dropped token into 0 * inf = NaN."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Settings of the published formulas; see `policy_loss`."""

    kind: str = "GRPO"
    """The formula; case-insensitive."""
    epsilon: float = 0.2
    """Half-width of the clip range."""
    epsilon_higher: float = 0.1
    """Extra width of the clip range upwards."""
    dual_clip: float | None = None
    """c of dual-clip PPO, greater than 1 (GRPO and GSPO only)."""
    beta1: float | None = None
    """CE-GPPO weight of tokens clipped from below (GRPO only)."""
    beta2: float | None = None
    """CE-GPPO weight of tokens clipped from above (GRPO only)."""
    importance_weight_truncation: float | None = None
    """Largest weight (MINIRL only)."""
    importance_weight_cap_ratio: float = 4.0
    """Factor c on the clip range that gives the hard drop range
    `[1 - epsilon*c*k, 1 + (epsilon + epsilon_higher)*c*k]` (GRPO and MINIRL only); 0: no range."""
    strict_in_bound: bool = False
    """k = 1/c, so that the drop range is the clip range."""
    out_of_date_decay: float | None = None
    """k = exp(-staleness * decay), unless `strict_in_bound`; otherwise k = 1."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the ratio in the clipped objectives."""
        return 1.0 - self.epsilon, 1.0 + self.epsilon + self.epsilon_higher


class TargetLosses(NamedTuple):
    """Unreduced policy loss; every field has shape [N]."""

    loss: torch.Tensor
    """Loss of each target token, before `keep` is applied."""
    keep: torch.Tensor
    """bool; False where the ratio left the hard drop range in the direction of its advantage."""
    ratio: torch.Tensor
    """Importance ratio pi/mu without gradient."""
    clipped: torch.Tensor
    """bool; True where clipping is active, i.e. the plain gradient r*A was replaced."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LossInputs:
    """What a policy loss is computed from: N target tokens of whole turns.

    A step is computed in micro-batches, in any order and on several ranks. Turns stay whole, records
    do not. Whatever a loss returns for a token may therefore depend on its own turn alone.
    N may be 0.
    """

    policy_logprobs: torch.Tensor
    """log pi, float32 or float64 [N]; the only input with a gradient."""
    behavior: torch.Tensor
    """log mu of the sampler, in the dtype of `policy_logprobs` [N]."""
    proximal: torch.Tensor
    """log pi_p (`--proximal`), in the same dtype [N]; by default equal to `behavior`."""
    reference: torch.Tensor | None = None
    """Logprobs of the reference model [N], with `--kl_coefficient`."""
    teacher_logprobs: torch.Tensor | None = None
    """Logprobs of the K teachers of `--teachers`, in their order, at temperature 1 and in the dtype
    of `policy_logprobs` [N, K]; None without teachers."""
    entropies: torch.Tensor | None = None
    """Entropy of the policy in nats [N], without gradient, with `--log_entropy`."""
    advantages: torch.Tensor
    """A, in the dtype of `policy_logprobs` [N]."""
    staleness: torch.Tensor
    """Policy versions that each token is behind, int64 [N]."""
    turns: torch.Tensor
    """Number of each token's turn, int64 [N], below N; see `sequence_sums`."""
    records: torch.Tensor
    """Number of each token's record in the step, int64 [N]."""
    settings: LossSettings
    """Clip ranges and bounds from the flags."""

    @property
    def behavior_ratio(self) -> torch.Tensor:
        """The importance ratio pi/mu [N], without gradient."""
        return bounded_log_ratio(self.policy_logprobs, self.behavior).exp().detach()


class Correction(NamedTuple):
    """Factor and mask of each target token's loss; every field has the shape [N]."""

    weights: torch.Tensor
    keep: torch.Tensor
    """bool; False where the token is masked."""


def policy_loss(
    policy_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    settings: LossSettings = LossSettings(),
    *,
    proximal_logprobs: torch.Tensor | None = None,
    staleness: torch.Tensor | None = None,
    sequences: torch.Tensor | None = None,
) -> TargetLosses:
    """Return the policy loss of every target token.

    With `lower = 1 - epsilon` and `upper = 1 + epsilon + epsilon_higher` (DAPO, 2503.14476, is GRPO
    with 0.2, 0.08 and the `token_mean` reduction), and r = pi/pi_p if proximal logprobs are given:

    - GRPO: `-min(r*A, clip(r, lower, upper)*A)`. With `beta1` the gradient of tokens clipped from
      below (r < lower, A < 0) is `beta1 * lower * A * grad(log pi)` instead of 0; with `beta2`
      that of tokens clipped from above is `beta2 * upper * A * grad(log pi)` (CE-GPPO).
      `dual_clip` c (1912.09729) bounds the loss of tokens with A < 0 by `-c*A`.
    - MINIRL (2512.01374): `-sg(min(w, truncation)) * A * log pi`, w = pi/mu; bounded by the drop
      range. The paper's: truncation 5, epsilon 0.2, epsilon_higher 0.07, `strict_in_bound`.
    - GSPO (2507.18071, token form): as GRPO with the ratio `sg(s) * exp(log pi - sg(log pi))`,
      s = exp(mean over the token's sequence of log r). A sequence is one turn.
    - CISPO (2506.13585): `-sg(min(r, upper)) * A * log pi`.
    - REINFORCE: `-A * log pi`, without importance weight.

    Args:
        policy_logprobs: log pi [N], carries the gradient.
        behavior_logprobs: log mu [N].
        advantages: A [N].
        settings: the formula and its parameters.
        proximal_logprobs: log pi_p [N] (decoupled PPO); mu by default. The drop range and
            `TargetLosses.ratio` always use pi/mu.
        staleness: policy versions that a token is behind [N]; needed with `out_of_date_decay`.
        sequences: number of each target token's turn, int64 [N], below N (GSPO only). A turn must not be
            split over calls.

    Returns:
        Loss, keep mask, ratio and clip mask, each [N].

    Raises:
        ConfigError: unknown kind, or an argument that the kind needs is missing.
        ValueError: shapes differ.
    """
    shapes = {tuple(t.shape) for t in (policy_logprobs, behavior_logprobs, advantages)}
    if len(shapes) != 1:
        raise ValueError(f"logprobs and advantages differ in shape: {sorted(shapes)}")
    kind = settings.kind.upper()
    if kind == "GSPO" and sequences is None:
        raise ConfigError("the GSPO loss needs the turn of every target token")
    drops = kind in _WITH_DROP_RANGE and settings.importance_weight_cap_ratio
    decays = settings.out_of_date_decay is not None and not settings.strict_in_bound
    if drops and decays and staleness is None:
        raise ConfigError("out_of_date_decay needs the staleness of every target token")
    none = torch.zeros_like(policy_logprobs, dtype=torch.int64, requires_grad=False)
    behavior = behavior_logprobs.to(policy_logprobs.dtype)
    inputs = LossInputs(
        policy_logprobs=policy_logprobs,
        behavior=behavior,
        proximal=behavior if proximal_logprobs is None else proximal_logprobs.detach(),
        advantages=advantages.to(policy_logprobs.dtype),
        staleness=none if staleness is None else staleness,
        turns=none if sequences is None else sequences,
        records=none,
        settings=settings,
    )
    losses = LOSSES.formula(kind)(inputs)
    assert isinstance(losses, TargetLosses), "built-in losses return nothing else"
    return losses


LossFunction = Callable[..., object]
LOSSES: FormulaRegistry[LossFunction] = FormulaRegistry(
    "loss_calculator", "loss", "agentrl.algorithms.built_in_losses"
)
"""Functions of `LossInputs`, by the value of `--loss_calculator`."""


def plain_losses(inputs: LossInputs, loss: torch.Tensor) -> TargetLosses:
    """Return losses [N] of which none is clipped or dropped."""
    kept = torch.ones_like(loss, dtype=torch.bool, requires_grad=False)
    return TargetLosses(loss, kept, inputs.behavior_ratio, ~kept)


class EvaluatedLoss(NamedTuple):
    """Losses of N target tokens, and the user's figures about them."""

    losses: TargetLosses
    metrics: Mapping[str, torch.Tensor]
    """Name -> value of each target token [N], without gradient."""


def evaluated_loss(inputs: LossInputs, arguments: Mapping[str, Any]) -> EvaluatedLoss:
    """Return the losses by `inputs.settings.kind`.

    Args:
        inputs: of one micro-batch.
        arguments: keyword arguments of the user's function (`--loss_args`).

    Raises:
        ConfigError: there is no such loss.
        UserCodeError: the user's function failed, or returned something else.
    """
    kind = inputs.settings.kind
    result = LOSSES.formula(kind)(inputs, **arguments)
    where = f"--loss_calculator {kind}"
    metrics: object = {}
    if isinstance(result, tuple) and not isinstance(result, TargetLosses):
        if len(result) != 2:
            raise UserCodeError(
                f"{where}: it returned a tuple of {len(result)}; return the loss [N], TargetLosses, "
                "or (loss, metrics)"
            )
        result, metrics = result
    losses = plain_losses(inputs, result) if isinstance(result, torch.Tensor) else result
    if not isinstance(losses, TargetLosses):
        raise UserCodeError(
            f"{where}: it returned {type(losses).__name__}; return the loss [N], TargetLosses, or "
            "(loss, metrics)"
        )
    _check_shapes(losses, inputs, where)
    return EvaluatedLoss(losses, _checked_metrics(metrics, inputs, where))


def _check_shapes(losses: TargetLosses, inputs: LossInputs, where: str) -> None:
    expected = inputs.policy_logprobs
    for name, values in losses._asdict().items():
        if values.shape != expected.shape:
            raise UserCodeError(
                f"{where}: {name} has the shape {list(values.shape)}; return one value for each of "
                f"the {len(expected)} target tokens, without sum or mean"
            )
    if losses.loss.dtype != expected.dtype:
        raise UserCodeError(
            f"{where}: the loss is {losses.loss.dtype} and policy_logprobs {expected.dtype}; compute "
            "in the dtype of policy_logprobs"
        )
    for name in ("keep", "clipped"):
        if getattr(losses, name).dtype != torch.bool:
            raise UserCodeError(f"{where}: {name} is {getattr(losses, name).dtype}; return bool")


def _checked_metrics(metrics: object, inputs: LossInputs, where: str) -> dict[str, torch.Tensor]:
    if not isinstance(metrics, Mapping):
        raise UserCodeError(
            f"{where}: its metrics are {type(metrics).__name__}; return a mapping of names to [N]"
        )
    for name, values in metrics.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise UserCodeError(f"{where}: the metric {name!r} needs a name of letters and _")
        if not isinstance(values, torch.Tensor) or values.shape != inputs.policy_logprobs.shape:
            raise UserCodeError(
                f"{where}: the metric {name} must be a tensor with one value for each target token, "
                "which the product averages"
            )
    return {name: values.detach() for name, values in metrics.items()}


def weighted_sum(losses: TargetLosses, weights: torch.Tensor) -> torch.Tensor:
    """Return the share of the step's loss that these target tokens contribute, a scalar.

    Args:
        losses: of one micro-batch [N].
        weights: their weights in the whole step [N], see `reductions.target_weights`.
    """
    kept = torch.where(losses.keep, losses.loss, torch.zeros_like(losses.loss))
    return (weights.to(kept.dtype) * kept).sum()


def cross_entropy(policy_logprobs: torch.Tensor) -> TargetLosses:
    """Return the cross-entropy of every target token, `-log pi` [N]; nothing is clipped or dropped."""
    ones = torch.ones_like(policy_logprobs, requires_grad=False)
    return TargetLosses(
        loss=-policy_logprobs, keep=ones.bool(), ratio=ones, clipped=torch.zeros_like(ones).bool()
    )


def bounded_log_ratio(policy_logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log of the ratio of two policies [N], within `MAX_LOG_RATIO`."""
    log_ratio = policy_logprobs - other_logprobs.to(policy_logprobs.dtype)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def inside_drop_range(inputs: LossInputs) -> torch.Tensor:
    """Return False [N] where pi/mu left the drop range in the direction of its advantage."""
    settings, ratio, advantages = inputs.settings, inputs.behavior_ratio, inputs.advantages
    cap = settings.importance_weight_cap_ratio
    if not cap:
        return torch.ones_like(ratio, dtype=torch.bool)
    shrink: float | torch.Tensor = 1.0
    if settings.strict_in_bound:
        shrink = 1.0 / cap
    elif settings.out_of_date_decay is not None:
        decay = settings.out_of_date_decay
        shrink = (-inputs.staleness.to(torch.float64) * decay).clamp(max=0.0).exp()
    upper = 1.0 + (settings.epsilon + settings.epsilon_higher) * cap * shrink
    lower = 1.0 - settings.epsilon * cap * shrink
    is_outside = ((ratio > upper) & (advantages > 0)) | ((ratio < lower) & (advantages < 0))
    return ~is_outside


def proximal_logprobs(
    policy_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    *,
    kind: ProximalKind,
    staleness: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return log pi_p of every target token [N].

    - `behavior`: log mu, so that rho = 1;
    - `recompute`: the trainer's logprobs at the start of a step of one update. These equal the
      policy's, so no extra forward pass is needed;
    - `loglinear` (A-3PO, 2512.06547): `log mu + d/(d+1) * (log pi - log mu)` for a token that is d
      versions old; the step makes the (d+1)-th version after it.

    Args:
        policy_logprobs: log pi [N].
        behavior_logprobs: log mu [N].
        kind: which of the above.
        staleness: d of every target token [N] (`loglinear` only).

    Raises:
        ConfigError: `loglinear` without staleness.
    """
    policy = policy_logprobs.detach()
    behavior = behavior_logprobs.to(policy.dtype)
    if kind == "behavior":
        return behavior
    if kind == "recompute":
        return policy
    if staleness is None:
        raise ConfigError("loglinear proximal logprobs need the staleness of every target token")
    num_versions = staleness.to(policy.dtype).clamp(min=0.0)
    return behavior + num_versions / (num_versions + 1.0) * (policy - behavior)


def importance_correction(
    proximal: torch.Tensor,
    behavior: torch.Tensor,
    *,
    kind: CorrectionKind,
    level: CorrectionLevel = "token",
    lower: float = 0.5,
    upper: float = 2.0,
    veto_threshold: float | None = None,
    sequences: torch.Tensor | None = None,
) -> Correction:
    """Return the weight and mask of every target token.

    With R = rho at `token` level, the product of rho over the token's sequence at `sequence` level,
    its geometric mean at `sequence_mean` level:

    - `none`: 1; `full`: R (decoupled PPO, 2505.24298);
    - `tis`: min(R, upper) (truncated importance sampling);
    - `icepop`: R, masked outside [lower, upper] (token level, usually [0.5, 5]);
    - `mis`: min(R, upper), masked outside [lower, upper] (masked importance sampling). Tokens that the
      truncation would change are masked, so the result equals `icepop` with the same bounds.

    Args:
        proximal: log pi_p [N].
        behavior: log mu [N].
        kind: which of the above.
        level: scope of R.
        lower: lower bound on R.
        upper: upper bound on R.
        veto_threshold: mask a whole sequence in which any token has rho below this.
        sequences: number of each target token's turn, int64 [N], below N. A turn must not be split
            over calls.

    Raises:
        ConfigError: sequences are needed and missing.
    """
    log_rho = bounded_log_ratio(proximal.detach(), behavior)
    needs_sequences = veto_threshold is not None or (kind != "none" and level != "token")
    if needs_sequences and sequences is None:
        raise ConfigError("corrections of whole sequences need the turn of every target token")
    keep = torch.ones_like(log_rho, dtype=torch.bool)
    weights = torch.ones_like(log_rho)
    if kind != "none":
        if level != "token" and sequences is not None:
            log_rho_level = sequence_sums(log_rho, sequences, mean=level == "sequence_mean")
        else:
            log_rho_level = log_rho
        weights = log_rho_level.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if kind in ("icepop", "mis"):
            keep = (weights >= lower) & (weights <= upper)
        if kind in ("tis", "mis"):
            weights = weights.clamp(max=upper)
    if veto_threshold is not None and sequences is not None:
        vetoes = (log_rho.exp() < veto_threshold).to(log_rho.dtype)
        keep = keep & (sequence_sums(vetoes, sequences) == 0)
    return Correction(weights=weights, keep=keep)


def corrected(losses: TargetLosses, correction: Correction) -> TargetLosses:
    """Return the losses with their importance correction applied."""
    return losses._replace(
        loss=correction.weights.to(losses.loss.dtype) * losses.loss,
        keep=losses.keep & correction.keep,
    )


def kl_penalty(
    policy_logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, kind: KLEstimator = "k3"
) -> torch.Tensor:
    """Return an estimate of KL(pi || reference) at every target token [N], with gradient.

    With d = log pi - log reference: `k1` is d, `k2` is d^2/2, `k3` is exp(-d) - 1 + d
    (joschu.net/blog/kl-approx.html), below d = -20 its tangent there. As a loss, `k2` has the
    gradient of the KL itself; that of `k1` is zero on average.

    Args:
        policy_logprobs: log pi [N], carries the gradient.
        reference_logprobs: of the reference model [N].
        kind: which estimate.
    """
    difference = policy_logprobs - reference_logprobs.to(policy_logprobs.dtype)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    # Only the exponential is bounded, so the gradient stays 1 far above the reference. Below the
    # bound, k3 continues along its tangent, whose gradient still pulls the token back.
    exponent = (-difference).clamp(max=MAX_LOG_RATIO)
    excess = -difference - exponent
    return torch.expm1(exponent) + excess * exponent.exp() + difference


def sequence_sums(
    values: torch.Tensor, sequences: torch.Tensor, *, mean: bool = False
) -> torch.Tensor:
    """Return, for every target token, the sum (or mean) of the values of its sequence [N].

    Args:
        values: [N].
        sequences: number of each token's sequence, int64 [N], below N.
        mean: divide by the number of tokens.
    """
    # Sized for N sequences, because counting the sequences would wait for the device.
    sums = torch.zeros_like(values).index_add(0, sequences, values)
    if mean:
        counts = torch.zeros_like(values).index_add(0, sequences, torch.ones_like(values))
        sums = sums / counts.clamp(min=1.0)
    return sums.index_select(0, sequences)
