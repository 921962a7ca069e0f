"""Figures over the target tokens of a step: ratios per turn, clipping by sign, KL estimates.

Each rank keeps a few bytes per token and sends them to rank 0: quantiles, unlike means, cannot be
computed from per-rank sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Self

import numpy as np
import torch

from agentrl.algorithms.losses import MAX_LOG_RATIO, TargetLosses
from agentrl.models.policy import TargetLogprobs

_PERCENTILES = (1, 10, 50, 90, 99)


@dataclass(frozen=True, eq=False)
class TargetTrace:
    """Values kept for N target tokens; every field has the shape [N]."""

    turns: np.ndarray
    """int64, index into `StepBatch.turn_ids`; the tokens of a turn are in order."""
    log_ratios: np.ndarray
    """float32, log pi - log mu."""
    advantages: np.ndarray
    """int8, the sign of the advantage."""
    clipped: np.ndarray
    """bool, True for tokens in the loss whose gradient clipping replaced."""
    kept: np.ndarray
    """bool, True for tokens in the loss."""
    masked: np.ndarray
    """bool, True for tokens that an importance correction masked."""
    entropies: np.ndarray
    """float16, in nats; NaN if they are not computed."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the tokens of several micro-batches or ranks."""
        dtypes = (np.int64, np.float32, np.int8, bool, bool, bool, np.float16)
        return cls(*_concatenated(cls, parts, dtypes))

    @classmethod
    def of(
        cls,
        turns: np.ndarray,
        policy: TargetLogprobs,
        behavior_logprobs: torch.Tensor,
        advantages: np.ndarray,
        losses: TargetLosses,
        masked: torch.Tensor,
    ) -> Self:
        """Return the trace of one micro-batch.

        Args:
            turns: the turn of every target token, int64 [N].
            policy: log pi [N], without gradient, and entropies if they are computed.
            behavior_logprobs: log mu [N].
            advantages: A [N].
            losses: their losses.
            masked: bool [N], tokens that an importance correction masked.
        """
        kept = losses.keep.cpu().numpy()
        entropies = np.full(len(kept), np.nan, np.float16)
        if policy.entropies is not None:
            entropies = policy.entropies.half().cpu().numpy()
        return cls(
            turns=turns,
            log_ratios=(policy.logprobs - behavior_logprobs).float().cpu().numpy(),
            advantages=np.sign(advantages).astype(np.int8),
            clipped=losses.clipped.cpu().numpy() & kept,
            kept=kept,
            masked=masked.cpu().numpy(),
            entropies=entropies,
        )


@dataclass(frozen=True, eq=False)
class TurnRatios:
    """Importance ratios of K turns of a step; every field has shape [K]."""

    turns: np.ndarray
    """int64, index into `StepBatch.turn_ids`; a turn is in one micro-batch only."""
    num_targets: np.ndarray
    """Target tokens."""
    num_dropped: np.ndarray
    """Target tokens beyond the hard drop range, which are not in the loss."""
    num_masked: np.ndarray
    """Target tokens that an importance correction masked; not counted in `num_dropped`."""
    num_clipped: np.ndarray
    """Target tokens in the loss whose gradient clipping replaced."""
    mean: np.ndarray
    """float64, of the importance ratio, dropped tokens included."""
    std: np.ndarray
    min: np.ndarray
    max: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the turns of several micro-batches or ranks."""
        return cls(*_concatenated(cls, parts, (np.int64,) * 5 + (np.float64,) * 4))

    @classmethod
    def of(cls, turns: np.ndarray, losses: TargetLosses, masked: torch.Tensor) -> Self:
        """Return the ratios of one micro-batch.

        Args:
            turns: the turn of every target token, int64 [N].
            losses: losses of the same micro-batch.
            masked: bool [N], tokens that an importance correction masked.
        """
        ratio = losses.ratio.double().cpu().numpy()
        dropped = (~losses.keep & ~masked).cpu().numpy()
        clipped = (losses.clipped & losses.keep).cpu().numpy()
        numbers, index, counts = np.unique(turns, return_inverse=True, return_counts=True)

        def total(values: np.ndarray) -> np.ndarray:
            return np.bincount(index, weights=values, minlength=len(numbers))

        mean = total(ratio) / counts
        low, high = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
        np.minimum.at(low, index, ratio)
        np.maximum.at(high, index, ratio)
        return cls(
            turns=numbers,
            num_targets=counts,
            num_dropped=total(dropped).astype(np.int64),
            num_masked=total(masked.cpu().numpy()).astype(np.int64),
            num_clipped=total(clipped).astype(np.int64),
            mean=mean,
            std=np.sqrt(total((ratio - mean[index]) ** 2) / counts),
            min=low,
            max=high,
        )


@dataclass(frozen=True)
class TargetStats:
    """Figures of a step. Means are over all its target tokens; None if there are none."""

    clip_fraction: float = 0.0
    clip_fraction_positive: float | None = None
    """Of the tokens with a positive advantage."""
    clip_fraction_negative: float | None = None
    drop_fraction: float = 0.0
    """Tokens beyond the hard drop range, or masked by a correction."""
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


def target_stats(trace: TargetTrace) -> TargetStats:
    """Return the figures of a step."""
    if len(trace.log_ratios) == 0:
        return TargetStats()
    log_ratios = trace.log_ratios.astype(np.float64)
    bounded = log_ratios.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratios = np.exp(bounded)
    return TargetStats(
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


def _concatenated(
    kind: type, parts: Sequence[object], dtypes: Sequence[type]
) -> Iterator[np.ndarray]:
    """Yield each field of the parts as one array; without parts, an empty one of the right dtype."""
    for column, dtype in zip(fields(kind), dtypes, strict=True):
        arrays = [getattr(part, column.name) for part in parts]
        yield np.concatenate([np.empty(0, dtype), *arrays])
