"""Figures over all loss terms of a step: importance ratios, clipping by sign, KL estimates.

Ranks keep a few bytes a term and hand them to rank 0, because quantiles cannot be added up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Self

import numpy as np
import torch

from agentrl.algorithms.corrections import MAX_LOG_RATIO
from agentrl.algorithms.losses import LossTerms

_PERCENTILES = (1, 10, 50, 90, 99)


@dataclass(frozen=True, eq=False)
class TermTrace:
    """What is kept of N loss terms; every field has shape [N]."""

    log_ratios: np.ndarray
    """float32, log pi - log mu."""
    advantages: np.ndarray
    """int8, the sign of the advantage."""
    clipped: np.ndarray
    """bool, in the loss with a gradient that the clip range replaced."""
    kept: np.ndarray
    """bool, in the loss at all."""

    @classmethod
    def of(
        cls,
        policy_logprobs: torch.Tensor,
        behavior_logprobs: torch.Tensor,
        advantages: np.ndarray,
        terms: LossTerms,
    ) -> Self:
        """Return the trace of one micro-batch.

        Args:
            policy_logprobs: log pi [N], without gradient.
            behavior_logprobs: log mu [N].
            advantages: A [N].
            terms: their loss.
        """
        kept = terms.keep.cpu().numpy()
        return cls(
            log_ratios=(policy_logprobs - behavior_logprobs).float().cpu().numpy(),
            advantages=np.sign(advantages).astype(np.int8),
            clipped=terms.clipped.cpu().numpy() & kept,
            kept=kept,
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the terms of several micro-batches or ranks together."""
        empty = {"log_ratios": np.float32, "advantages": np.int8, "clipped": bool, "kept": bool}
        return cls(
            **{
                field.name: np.concatenate(
                    [np.empty(0, empty[field.name]), *(getattr(part, field.name) for part in parts)]
                )
                for field in fields(cls)
            }
        )


@dataclass(frozen=True)
class TermStats:
    """Means are over all loss terms of the step; None where there is no term to speak of."""

    clip_fraction: float = 0.0
    clip_fraction_positive: float | None = None
    """Of the terms with a positive advantage."""
    clip_fraction_negative: float | None = None
    drop_fraction: float = 0.0
    """Terms beyond the hard drop range, or masked by a correction."""
    ratio_mean: float | None = None
    ratio_max: float | None = None
    ratio_quantiles: dict[str, float] = field(default_factory=dict)
    """`p01`, `p10`, `p50`, `p90`, `p99`."""
    logprob_gap: float | None = None
    """Mean |log pi - log mu|."""
    sampler_kl_k1: float | None = None
    """Estimates of KL(mu || pi), the sampler's policy against the trainer's. With d = log mu - log
    pi: k1 is d, k2 d^2/2, k3 exp(-d) - 1 + d (joschu.net/blog/kl-approx.html)."""
    sampler_kl_k2: float | None = None
    sampler_kl_k3: float | None = None


def term_stats(trace: TermTrace) -> TermStats:
    """Return the figures of a step."""
    if len(trace.log_ratios) == 0:
        return TermStats()
    log_ratios = trace.log_ratios.astype(np.float64)
    bounded = log_ratios.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratios = np.exp(bounded)
    return TermStats(
        clip_fraction=float(trace.clipped.mean()),
        clip_fraction_positive=_share(trace.clipped, trace.advantages > 0),
        clip_fraction_negative=_share(trace.clipped, trace.advantages < 0),
        drop_fraction=float((~trace.kept).mean()),
        ratio_mean=float(ratios.mean()),
        ratio_max=float(ratios.max()),
        ratio_quantiles={
            f"p{percent:02d}": float(np.percentile(ratios, percent)) for percent in _PERCENTILES
        },
        logprob_gap=float(np.abs(log_ratios).mean()),
        sampler_kl_k1=float(-log_ratios.mean()),
        sampler_kl_k2=float(np.square(log_ratios).mean() / 2),
        sampler_kl_k3=float((np.expm1(bounded) - bounded).mean()),
    )


def _share(marked: np.ndarray, among: np.ndarray) -> float | None:
    return float(marked[among].mean()) if among.any() else None
