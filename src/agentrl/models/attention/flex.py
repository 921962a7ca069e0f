"""Attention over token trees through FlexAttention, for CUDA.

Token k is visible to token q exactly when `k <= q < ends[k]`, so one vector of integers is the
whole mask, and which blocks the kernel visits follows from the vector's extremes in each block.
Nothing is N x N: the largest array has an entry a *pair of blocks*. FlexAttention has no backward
pass on CPU; `models.attention` is for that.

Shape legend as in `models.attention`; P tokens above the row where it is a chunk of a longer one.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from agentrl.data.blocks import BLOCK, key_ends, plan_blocks
from agentrl.data.rows import PackedRow
from agentrl.models.attention.tree_attention import ChunkStates, with_kept_states
from agentrl.models.split import over_ranks

FLEX_ATTENTION = "agentrl_flex"


@dataclass(frozen=True)
class FlexLayout:
    """The mask of a row on the device, made once a row."""

    mask: BlockMask
    states: ChunkStates | None = None

    @classmethod
    def build(
        cls,
        row: PackedRow,
        device: torch.device,
        states: ChunkStates | None = None,
        num_above: int = 0,
    ) -> "FlexLayout":
        """Make the mask from the row's intervals."""
        ends = key_ends(row, num_above)
        plan = plan_blocks(ends, num_above)
        ends_device = torch.from_numpy(ends).to(device)

        def visible(
            batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            place = query + num_above
            return (key <= place) & (place < ends_device[key])

        partial_counts, partial_indices = _listed(plan.partial, device)
        full_counts, full_indices = _listed(plan.full, device)
        mask = BlockMask.from_kv_blocks(
            partial_counts,
            partial_indices,
            full_counts,
            full_indices,
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(row.num_tokens, row.num_tokens + num_above),
        )
        return cls(mask, states)


def _listed(blocks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts [1, 1, Q] and indices [1, 1, Q, K] (those that count come first)."""
    counts = blocks.sum(axis=1).astype(np.int32)
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return (
        torch.from_numpy(counts)[None, None].to(device),
        torch.from_numpy(indices)[None, None].to(device),
    )


@cache
def _kernel() -> Any:
    # Dynamic shapes: rows differ in length, and a compilation a length takes many seconds.
    return torch.compile(flex_attention, dynamic=True)


def flex_tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    flex_layout: FlexLayout,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend along tree paths; called by transformers' attention layers.

    Args:
        module: the attention layer.
        query: [1, H, N, D] after the rotary embedding.
        key: [1, K, N, D].
        value: [1, K, N, D].
        attention_mask: always None, the layout says who sees whom.
        scaling: factor on the scores.
        flex_layout: mask of the row.

    Returns:
        The attention output [1, N, H, D] and None for the weights.
    """
    query, key, value = with_kept_states(module, flex_layout.states, query, key, value)
    # Uncompiled, it is a plain (and N x N) computation: good enough to check masks with.
    attend = _kernel() if query.is_cuda else flex_attention
    output: torch.Tensor = attend(
        query, key, value, block_mask=flex_layout.mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


AttentionInterface.register(FLEX_ATTENTION, over_ranks(flex_tree_attention))
