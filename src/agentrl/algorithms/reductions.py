"""The weight of every target token in the loss of its optimizer step.

Weights are fixed over the **global** batch of the step before anything is merged, packed or split
over ranks, so the loss is the plain sum of weighted losses, wherever they are computed. Target tokens
whose ratio later leaves the drop range still count in the normalizers. Dropping depends on the
policy: excluding dropped tokens would require a forward pass over the whole step before the first
gradient, and would raise the weight of the remaining ones.
"""

from typing import Literal

import numpy as np

Reduction = Literal["token_mean", "sequence_mean", "sequence_sum"]


def reduction_kind(*, token_level_loss: bool, skip_length_normalization: bool) -> Reduction:
    """Return the reduction selected by AgentRL's two flags."""
    if token_level_loss:
        return "token_mean"
    return "sequence_sum" if skip_length_normalization else "sequence_mean"


def target_weights(
    sequences: np.ndarray, *, kind: Reduction, normalizer_length: int | None = None
) -> np.ndarray:
    """Return the weight of every target token of a step, float64 [N].

    With N target tokens, M sequences and n_i target tokens in sequence i:

    - `token_mean`: 1 / N (DAPO, 2503.14476);
    - `sequence_mean`: 1 / (M * n_i) (GRPO, 2402.03300);
    - `sequence_sum`: 1 / M (MINIRL), or 1 / (M * L) with a constant L (Dr.GRPO, 2503.20783).

    Args:
        sequences: index of the sequence of each target token, int [N]; in AgentRL a sequence is a Record
            with all its turns.
        kind: which of the above.
        normalizer_length: L (`sequence_sum` only).
    """
    num_targets = len(sequences)
    if num_targets == 0:
        return np.empty(0, dtype=np.float64)
    if kind == "token_mean":
        return np.full(num_targets, 1.0 / num_targets)
    _, index, counts = np.unique(sequences, return_inverse=True, return_counts=True)
    if kind == "sequence_sum":
        return np.full(num_targets, 1.0 / (len(counts) * (normalizer_length or 1)))
    weights: np.ndarray = 1.0 / (len(counts) * counts[index.reshape(-1)].astype(np.float64))
    return weights
