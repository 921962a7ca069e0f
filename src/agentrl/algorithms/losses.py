"""Policy losses, one value a loss term, unreduced.

Notation: mu = behavior policy (the sampler), pi = policy in training, r = pi/mu, A = advantage,
sg = stop-gradient. A loss term is one sampled token of one turn; a token that several records
sampled alike is several terms. Reduction lives in `agentrl.algorithms.reductions`: the scalar loss
is `sum(weights * where(keep, loss, 0))` over the whole optimizer step.

The hard drop range and GRPO follow AgentRL's documented formulas.
"""

from typing import Literal, NamedTuple, get_args

import torch

from agentrl.algorithms.corrections import MAX_LOG_RATIO, Correction, sequence_sums
from agentrl.errors import ConfigError

LossKind = Literal["GRPO", "MINIRL", "GSPO", "CISPO", "REINFORCE"]
LOSS_KINDS: tuple[LossKind, ...] = get_args(LossKind)
CROSS_ENTROPY = "CROSSENTROPY"
"""The loss of supervised fine-tuning; it knows neither advantages nor a sampler's policy."""


class LossTerms(NamedTuple):
    """Unreduced policy loss; every field has shape [N]."""

    loss: torch.Tensor
    """Loss of each term, before `keep` is applied."""
    keep: torch.Tensor
    """bool; False where the ratio left the hard drop range in the direction of its advantage."""
    ratio: torch.Tensor
    """Importance ratio pi/mu without gradient."""
    clipped: torch.Tensor
    """bool; True where clipping is active, i.e. the plain gradient r*A was replaced."""


def policy_loss(  # noqa: PLR0913 - the knobs of the published formulas
    policy_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    kind: str = "GRPO",
    epsilon: float = 0.2,
    epsilon_higher: float = 0.1,
    importance_weight_cap_ratio: float = 4.0,
    strict_in_bound: bool = False,
    out_of_date_decay: float | None = None,
    staleness: torch.Tensor | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    sequences: torch.Tensor | None = None,
    proximal_logprobs: torch.Tensor | None = None,
    dual_clip: float | None = None,
    importance_weight_truncation: float | None = None,
) -> LossTerms:
    """Return the policy loss of every term.

    With `lower = 1 - epsilon` and `upper = 1 + epsilon + epsilon_higher` (DAPO, 2503.14476, is
    GRPO with 0.2, 0.08 and the `token_mean` reduction), and r = pi/pi_p where proximal logprobs
    are given:

    - GRPO: `-min(r*A, clip(r, lower, upper)*A)`. With `beta1` the gradient of terms clipped from
      below (r < lower, A < 0) is `beta1 * lower * A * grad(log pi)` instead of 0; with `beta2`
      that of terms clipped from above is `beta2 * upper * A * grad(log pi)` (CE-GPPO).
      `dual_clip` c (1912.09729) bounds the loss of terms with A < 0 by `-c*A`.
    - MINIRL (2512.01374): `-sg(min(w, truncation)) * A * log pi`, w = pi/mu; bounded by the drop
      range. The paper's: truncation 5, epsilon 0.2, epsilon_higher 0.07, `strict_in_bound`.
    - GSPO (2507.18071, token form): as GRPO with the ratio `sg(s) * exp(log pi - sg(log pi))`,
      s = exp(mean over the term's sequence of log r). A sequence is one turn.
    - CISPO (2506.13585): `-sg(min(r, upper)) * A * log pi`.
    - REINFORCE: `-A * log pi`, without importance weight.

    Args:
        policy_logprobs: log pi [N], carries the gradient.
        behavior_logprobs: log mu [N].
        advantages: A [N].
        kind: one of `LOSS_KINDS`.
        epsilon: half-width of the clip range.
        epsilon_higher: extra width upwards.
        importance_weight_cap_ratio: factor c on the clip range that gives the hard drop range
            `[1 - epsilon*c*k, 1 + (epsilon + epsilon_higher)*c*k]`.
        strict_in_bound: k = 1/c, so the drop range is the clip range.
        out_of_date_decay: k = exp(-staleness * decay), unless `strict_in_bound`.
        staleness: policy versions that a term is behind [N]; needed with `out_of_date_decay`.
        beta1: CE-GPPO weight of terms clipped from below (GRPO only).
        beta2: CE-GPPO weight of terms clipped from above (GRPO only).
        sequences: index of each term's turn, int64 [N] (GSPO only). A turn must not be split over
            calls.
        proximal_logprobs: log pi_p [N] (decoupled PPO); mu takes its place when not given. The
            drop range and `LossTerms.ratio` stay with pi/mu.
        dual_clip: c above, greater than 1 (GRPO and GSPO only).
        importance_weight_truncation: largest weight (MINIRL only).

    Returns:
        Loss, keep mask, ratio and clip mask, each [N].

    Raises:
        ConfigError: unknown kind, or an argument that the kind needs is missing.
        ValueError: shapes differ.
    """
    shapes = {tuple(t.shape) for t in (policy_logprobs, behavior_logprobs, advantages)}
    if len(shapes) != 1:
        raise ValueError(f"logprobs and advantages differ in shape: {sorted(shapes)}")
    lower, upper = 1.0 - epsilon, 1.0 + epsilon + epsilon_higher
    log_ratio = policy_logprobs - behavior_logprobs.to(policy_logprobs.dtype)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = advantages.to(policy_logprobs.dtype)
    behavior_ratio = log_ratio.exp().detach()
    if proximal_logprobs is not None:
        log_ratio = policy_logprobs - proximal_logprobs.detach().to(policy_logprobs.dtype)
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    name = checked_kind(kind)
    if name == "GRPO":
        loss, clipped = _clipped_surrogate(ratio, advantages, lower, upper, dual_clip)
        loss = _with_clipped_gradients(
            loss, policy_logprobs, ratio, advantages, lower, upper, beta1=beta1, beta2=beta2
        )
    elif name == "GSPO":
        if sequences is None:
            raise ConfigError("the GSPO loss needs the turn of every term")
        sequence_ratio = sequence_sums(log_ratio.detach(), sequences, mean=True).exp()
        surrogate = sequence_ratio * (policy_logprobs - policy_logprobs.detach()).exp()
        loss, clipped = _clipped_surrogate(surrogate, advantages, lower, upper, dual_clip)
    elif name == "CISPO":
        clipped = ratio.detach() > upper
        loss = -ratio.detach().clamp(max=upper) * advantages * policy_logprobs
    else:
        weights = behavior_ratio if name == "MINIRL" else torch.ones_like(ratio)
        clipped = torch.zeros_like(ratio, dtype=torch.bool)
        if name == "MINIRL" and importance_weight_truncation is not None:
            clipped = weights > importance_weight_truncation
            weights = weights.clamp(max=importance_weight_truncation)
        loss = -weights * advantages * policy_logprobs
    keep = _inside_drop_range(
        behavior_ratio,
        advantages,
        epsilon=epsilon,
        epsilon_higher=epsilon_higher,
        cap=importance_weight_cap_ratio,
        shrink=_shrink(importance_weight_cap_ratio, strict_in_bound, out_of_date_decay, staleness),
    )
    return LossTerms(loss=loss, keep=keep, ratio=behavior_ratio, clipped=clipped.detach())


def weighted_sum(terms: LossTerms, weights: torch.Tensor) -> torch.Tensor:
    """Return the share of the step's loss that these terms contribute, a scalar.

    Args:
        terms: of one micro-batch [N].
        weights: their weights in the whole step [N], see `reductions.term_weights`.
    """
    kept = torch.where(terms.keep, terms.loss, torch.zeros_like(terms.loss))
    return (weights.to(kept.dtype) * kept).sum()


def corrected(terms: LossTerms, correction: Correction) -> LossTerms:
    """Return the terms with their importance correction applied."""
    return terms._replace(
        loss=correction.weights.to(terms.loss.dtype) * terms.loss, keep=terms.keep & correction.keep
    )


def cross_entropy(policy_logprobs: torch.Tensor) -> LossTerms:
    """Return the cross-entropy of every term, `-log pi` [N]; nothing is clipped or dropped."""
    ones = torch.ones_like(policy_logprobs, requires_grad=False)
    return LossTerms(
        loss=-policy_logprobs, keep=ones.bool(), ratio=ones, clipped=torch.zeros_like(ones).bool()
    )


def checked_kind(kind: str) -> LossKind:
    """Return `kind` as one of `LOSS_KINDS` (in any case).

    Raises:
        ConfigError: it is none of them.
    """
    name = kind.upper()
    if name == CROSS_ENTROPY:
        raise ConfigError("CrossEntropy is the loss of supervised fine-tuning: use `agentrl sft`")
    if name not in LOSS_KINDS:
        raise ConfigError(f"unknown loss {kind!r}; supported are {', '.join(LOSS_KINDS)}")
    return name


def _clipped_surrogate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    lower: float,
    upper: float,
    dual_clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `-min(r*A, clip(r)*A)`, dually clipped, and where the plain side was not taken."""
    plain = ratio * advantages
    bounded = ratio.clamp(lower, upper) * advantages
    objective, clipped = torch.minimum(plain, bounded), bounded.detach() < plain.detach()
    if dual_clip is not None:
        floor = dual_clip * advantages
        is_floored = (advantages < 0) & (objective.detach() < floor)
        objective = torch.where(is_floored, floor, objective)
        clipped = clipped | is_floored
    return -objective, clipped


def _with_clipped_gradients(
    loss: torch.Tensor,
    policy_logprobs: torch.Tensor,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    lower: float,
    upper: float,
    *,
    beta1: float | None,
    beta2: float | None,
) -> torch.Tensor:
    """Give clipped terms the bounded gradients of CE-GPPO (2509.20712)."""
    # r / sg(r): value 1, gradient that of log pi. Written this way it stays finite for any r.
    unit = (policy_logprobs - policy_logprobs.detach()).exp()
    if beta1 is not None:
        below = (ratio.detach() < lower) & (advantages < 0)
        loss = torch.where(below, -beta1 * lower * unit * advantages, loss)
    if beta2 is not None:
        above = (ratio.detach() > upper) & (advantages > 0)
        loss = torch.where(above, -beta2 * upper * unit * advantages, loss)
    return loss


def _shrink(
    cap: float,
    strict_in_bound: bool,
    out_of_date_decay: float | None,
    staleness: torch.Tensor | None,
) -> float | torch.Tensor:
    """Return k, the factor on the drop range."""
    if strict_in_bound:
        return 1.0 / cap
    if out_of_date_decay is None:
        return 1.0
    if staleness is None:
        raise ConfigError("out_of_date_decay needs the staleness of every term")
    decay: torch.Tensor = (-staleness.to(torch.float64) * out_of_date_decay).clamp(max=0.0).exp()
    return decay


def _inside_drop_range(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    epsilon: float,
    epsilon_higher: float,
    cap: float,
    shrink: float | torch.Tensor,
) -> torch.Tensor:
    upper = 1.0 + (epsilon + epsilon_higher) * cap * shrink
    lower = 1.0 - epsilon * cap * shrink
    outwards = ((ratio > upper) & (advantages > 0)) | ((ratio < lower) & (advantages < 0))
    return ~outwards
