"""Attention over token trees through variable-length flash attention, for CUDA in bfloat16.

Every run of the row is a sequence: its queries, and beside them the keys of its whole path, which
are gathered. The kernel aligns the causal mask with the last of the keys, which is just what a run
at the end of its path sees. Compared with a block mask (`models.flex`), keys and values of a shared
path are copied for each of its runs, and no block is visited in vain.

Shape legend as in `models.attention`; G gathered keys of all runs together.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from agentrl.data.rows import PackedRow
from agentrl.models.attention.layout import attention_layout
from agentrl.models.attention.tree_attention import ChunkStates, with_kept_states
from agentrl.models.split import over_ranks

VARLEN_ATTENTION = "agentrl_varlen"


@dataclass(frozen=True)
class VarlenLayout:
    """The runs of a row on the device, made once a row."""

    query_edges: torch.Tensor
    """int32 [runs + 1], where the queries of each run begin and end."""
    key_edges: torch.Tensor
    """int32 [runs + 1], the same of their gathered keys."""
    key_index: torch.Tensor
    """int64 [G], places among the keys (those above the row first)."""
    longest_queries: int
    longest_keys: int
    states: ChunkStates | None = None

    @classmethod
    def build(
        cls,
        row: PackedRow,
        device: torch.device,
        states: ChunkStates | None = None,
        num_above: int = 0,
    ) -> "VarlenLayout":
        """Lay a row out; arguments as of `attention.DeviceLayout.build`."""
        layout = attention_layout(row, num_above=num_above)
        return cls(
            query_edges=_edges(layout.query_lengths, device),
            key_edges=_edges(layout.key_lengths, device),
            key_index=torch.from_numpy(layout.key_index).to(device),
            longest_queries=max(layout.query_lengths),
            longest_keys=max(layout.key_lengths),
            states=states,
        )


def _edges(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(edges).to(device)


def varlen_tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    varlen_layout: VarlenLayout,
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
        varlen_layout: runs of the row.

    Returns:
        The attention output [1, N, H, D] and None for the weights.
    """
    query, key, value = with_kept_states(module, varlen_layout.states, query, key, value)
    index = varlen_layout.key_index
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1).index_select(0, index),
        value[0].transpose(0, 1).index_select(0, index),
        varlen_layout.query_edges,
        varlen_layout.key_edges,
        varlen_layout.longest_queries,
        varlen_layout.longest_keys,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert isinstance(output, torch.Tensor), "nothing else was asked for"
    return output[None], None


AttentionInterface.register(VARLEN_ATTENTION, over_ranks(varlen_tree_attention))
