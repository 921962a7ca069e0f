"""Corrections for samples that do not come exactly from the trained policy, one per target token.

Notation as in `losses`, and pi_p = proximal policy (the trainer's at the start of the step) with
rho = pi_p/mu. Two things make rho differ from 1: engine and trainer compute the same weights
differently, and the sample may be some versions old. Nothing here carries a gradient.
"""

from typing import NamedTuple

import torch

from agentrl.errors import ConfigError
from agentrl.schema.formulas import CorrectionKind, CorrectionLevel, KLEstimator, ProximalKind

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this magnitude, here and in losses: e^20 is far outside every useful
bound, and an infinite ratio would turn the gradient of a dropped token into 0 * inf = NaN."""


class Correction(NamedTuple):
    """Factor and mask of each target token's loss; every field has the shape [N]."""

    weights: torch.Tensor
    keep: torch.Tensor
    """bool; False where the token is masked."""


def proximal_logprobs(
    policy_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    *,
    kind: ProximalKind,
    staleness: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return log pi_p of every target token [N].

    - `behavior`: log mu, so that rho = 1;
    - `recompute`: the trainer's logprobs at the start of the step. Each step makes one update, so
      these equal the policy's, and no extra forward pass is needed;
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
    log_rho = (proximal.detach() - behavior.to(proximal.dtype)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
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
