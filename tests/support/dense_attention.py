"""The dense oracle of attention along paths: one N x N mask, one explicit softmax.

Registered as a back end, for rows that hold whole trees; the trainer's own oracle computes one turn
a pass.
"""

import numpy as np
import torch

from agentrl.data.rows import PackedRow
from agentrl.models.attention import attention_registry
from agentrl.models.attention.backend import AttentionVariant, register_backend

DENSE_ATTENTION = "dense_oracle"


def visibility(row: PackedRow, window: int | None = None) -> np.ndarray:
    """Return the dense mask, bool [N, N], True at (q, k) if q attends to k."""
    index = np.arange(row.num_tokens)
    after = index[:, None] >= index[None, :]
    inside: np.ndarray = after & (index[:, None] < row.subtree_ends[None, :])
    if window is not None:
        inside &= row.positions[:, None] - row.positions[None, :] < window
    return inside


class DenseBackend:
    """Whole rows with all N x N scores."""

    flag = DENSE_ATTENTION
    implementation = DENSE_ATTENTION
    computes = frozenset({"sliding_window", "softcap", "s_aux"})

    def refusal(self, device: torch.device) -> str | None:
        return None

    def layout(
        self, row: PackedRow, device: torch.device, num_above: int = 0, window: int | None = None
    ) -> torch.Tensor:
        assert num_above == 0, "the oracle computes whole rows"
        return torch.from_numpy(visibility(row, window))

    def is_traceable(self, layout: torch.Tensor) -> bool:
        return False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        variant: AttentionVariant,
        layout: torch.Tensor,
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
        scores = query @ key.transpose(2, 3) * variant.scaling
        if variant.softcap is not None:
            scores = variant.softcap * torch.tanh(scores / variant.softcap)
        weights = scores.exp().masked_fill(~layout, 0.0)
        total = weights.sum(dim=-1, keepdim=True)
        if variant.s_aux is not None:
            total = total + variant.s_aux.exp()[None, :, None, None]
        return (weights / total @ value).transpose(1, 2)


DENSE = register_backend(DenseBackend())
attention_registry._BY_IMPLEMENTATION[DENSE_ATTENTION] = DENSE
