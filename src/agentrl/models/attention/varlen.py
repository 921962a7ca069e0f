"""Attention over token trees through variable-length flash attention, for CUDA in bfloat16.

Each segment of the row is one sequence: its queries, and the gathered keys of its whole path. The
kernel aligns the causal mask with the end of the keys, which matches a segment at the end of its
path. Compared with a block mask (`flex`), this copies the keys and values of a shared path for each
segment, but computes no masked-out entries.

Shape legend as in `backend`; S segments, G gathered keys of all segments together.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from agentrl.data.rows import PackedRow
from agentrl.models.attention.backend import AttentionVariant, register_backend, unless_cuda
from agentrl.models.attention.layout import attention_layout
from agentrl.models.torch_features import has_keyword


@dataclass(frozen=True)
class VarlenLayout:
    """The segments of a row on the device."""

    query_edges: torch.Tensor
    """int32 [S + 1], cumulative number of queries before each segment."""
    key_edges: torch.Tensor
    """int32 [S + 1], cumulative number of gathered keys before each segment."""
    key_index: torch.Tensor
    """int64 [G], indices among the keys (tokens above the row first)."""
    longest_queries: int
    longest_keys: int
    window: int | None


class VarlenBackend:
    """One sequence per segment, with gathered keys."""

    flag = "varlen"
    implementation = "agentrl_varlen"
    computes = frozenset({"sliding_window"})

    def refusal(self, device: torch.device) -> str | None:
        """Refuse devices other than CUDA."""
        return unless_cuda(device)

    def layout(
        self,
        row: PackedRow,
        device: torch.device,
        num_above: int = 0,
        window: int | None = None,
    ) -> VarlenLayout:
        """Return the row's segments on the device."""
        layout = attention_layout(row, num_above=num_above, window=window)
        return VarlenLayout(
            query_edges=_edges(layout.query_lengths, device),
            key_edges=_edges(layout.key_lengths, device),
            key_index=torch.from_numpy(layout.key_index).to(device),
            longest_queries=max(layout.query_lengths),
            longest_keys=max(layout.key_lengths),
            window=window,
        )

    def is_traceable(self, layout: VarlenLayout) -> bool:
        """Return False: lengths are read on the host."""
        return False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        variant: AttentionVariant,
        layout: VarlenLayout,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        groups: dict[str, Any] = {"enable_gqa": True}
        if not has_keyword(varlen_attn, "enable_gqa"):
            # Every key-value head then serves one query head.
            groups = {}
            key, value = (
                states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)
                for states in (key, value)
            )
        output = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1).index_select(0, layout.key_index),
            value[0].transpose(0, 1).index_select(0, layout.key_index),
            layout.query_edges,
            layout.key_edges,
            layout.longest_queries,
            layout.longest_keys,
            scale=variant.scaling,
            # Keys before and after: all (or those of the window) and none, which is causal.
            window_size=(-1 if layout.window is None else layout.window - 1, 0),
            **groups,
        )
        assert isinstance(output, torch.Tensor), "varlen_attn returns a tuple only on request"
        return output[None]


def _edges(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(edges).to(device)


VARLEN = register_backend(VarlenBackend())
