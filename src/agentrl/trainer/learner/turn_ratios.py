"""Importance ratios of a step, turn by turn: arrays that ranks hand to rank 0."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from agentrl.algorithms.losses import LossTerms


@dataclass(frozen=True, eq=False)
class TurnRatios:
    """K turns of a step; every field has shape [K]."""

    turns: np.ndarray
    """int64, index into `StepBatch.turn_ids`; a turn is in one micro-batch only."""
    num_terms: np.ndarray
    num_dropped: np.ndarray
    """Terms beyond the hard drop range: they are not in the loss."""
    num_masked: np.ndarray
    """Terms that an importance correction masked, and that are in no other count."""
    num_clipped: np.ndarray
    """Terms in the loss whose gradient the clip range replaced."""
    mean: np.ndarray
    """float64, of the importance ratio, dropped terms included."""
    std: np.ndarray
    min: np.ndarray
    max: np.ndarray


def measure(turns: np.ndarray, terms: LossTerms, masked: torch.Tensor) -> TurnRatios:
    """Return the ratios of one micro-batch.

    Args:
        turns: the turn of every term, int64 [T].
        terms: of the same micro-batch.
        masked: bool [T], terms that an importance correction masked.
    """
    ratio = terms.ratio.double().cpu().numpy()
    dropped = (~terms.keep & ~masked).cpu().numpy()
    clipped = (terms.clipped & terms.keep).cpu().numpy()
    numbers, index, counts = np.unique(turns, return_inverse=True, return_counts=True)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(index, weights=values, minlength=len(numbers))

    mean = total(ratio) / counts
    low, high = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
    np.minimum.at(low, index, ratio)
    np.maximum.at(high, index, ratio)
    return TurnRatios(
        turns=numbers,
        num_terms=counts,
        num_dropped=total(dropped).astype(np.int64),
        num_masked=total(masked.cpu().numpy()).astype(np.int64),
        num_clipped=total(clipped).astype(np.int64),
        mean=mean,
        std=np.sqrt(total((ratio - mean[index]) ** 2) / counts),
        min=low,
        max=high,
    )


def joined(parts: Sequence[TurnRatios]) -> TurnRatios:
    """Return the turns of several micro-batches or ranks together."""
    empty = np.empty(0, dtype=np.int64)
    return TurnRatios(
        **{
            field.name: np.concatenate([empty, *(getattr(part, field.name) for part in parts)])
            for field in fields(TurnRatios)
        }
    )
