"""Attention over token trees with torch's own kernels, on any device.

On CPU, the kernel's normalizers are available and segments need no masks (see `segments`). Other
devices call SDPA for one block of queries at a time, with the gathered keys of the block's path.
Nothing is N x N.

Shape legend as in `backend`.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from agentrl.data.rows import PackedRow
from agentrl.models.attention.backend import register_backend
from agentrl.models.attention.layout import attention_layout
from agentrl.models.attention.segments import Segment, attend_along_segments, segments_of

MAX_BLOCK = 512
"""Most queries in a block; bounds the mask of a block to MAX_BLOCK x path length."""


class CausalMasks:
    """Masks for blocks whose queries are the last of their keys, created on first use.

    The masks are additive and have the queries' dtype. SDPA would convert a bool mask to such a mask
    in every layer and keep every copy for the backward pass.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def lower_right(self, num_queries: int, num_keys: int, like: torch.Tensor) -> torch.Tensor:
        """Return a mask [num_queries, num_keys] with the device and dtype of `like`."""
        shape = (num_queries, num_keys)
        if shape not in self._made:
            hidden = torch.full(shape, -torch.inf, dtype=like.dtype, device=like.device)
            self._made[shape] = hidden.triu(diagonal=num_keys - num_queries + 1)
        return self._made[shape]


@dataclass(frozen=True)
class BlockLayout:
    """An `AttentionLayout` on a device other than the CPU."""

    query_lengths: list[int]
    key_lengths: list[int]
    key_index: torch.Tensor | None
    """int64 [total keys]; None if every block attends only to its own tokens."""
    masks: CausalMasks
    """Shared by all layers."""


class SDPABackend:
    """Segments without masks on CPU, blocks with masks elsewhere."""

    flag = "sdpa"
    implementation = "agentrl_tree"

    def refusal(self, device: torch.device) -> str | None:
        """Return None: SDPA runs on every device."""
        return None

    def layout(
        self, row: PackedRow, device: torch.device, num_above: int = 0
    ) -> "tuple[Segment, ...] | BlockLayout":
        """Return the row's segments for the CPU and its blocks for other devices."""
        if device.type == "cpu":
            return segments_of(attention_layout(row, num_above=num_above))
        return block_layout(row, device, num_above)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        layout: "tuple[Segment, ...] | BlockLayout",
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if isinstance(layout, BlockLayout):
            return _attend_by_blocks(query, key, value, layout, scaling)
        return attend_along_segments(query, key, value, layout, scaling).transpose(1, 2)


def block_layout(
    row: PackedRow, device: torch.device, num_above: int = 0, *, max_block: int = MAX_BLOCK
) -> BlockLayout:
    """Return the blocks of a row on a device; see `attention_layout` for the arguments."""
    layout = attention_layout(row, max_block=max_block, num_above=num_above)
    alone = layout.key_lengths == layout.query_lengths
    return BlockLayout(
        query_lengths=list(layout.query_lengths),
        key_lengths=list(layout.key_lengths),
        key_index=None if alone else torch.from_numpy(layout.key_index).to(device),
        masks=CausalMasks(),
    )


def _attend_by_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    scaling: float,
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    # One gather for all blocks, so the backward pass is one index_add. A gather per block would
    # allocate a gradient of the whole row for each block.
    keys, values = (_gathered(states, layout.key_index, group) for states in (key, value))
    outputs = [
        _block_attention(q, k, v, layout.masks, scaling)
        for q, k, v in zip(
            torch.split(query, layout.query_lengths, dim=2),
            torch.split(keys, layout.key_lengths, dim=2),
            torch.split(values, layout.key_lengths, dim=2),
            strict=True,
        )
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: CausalMasks,
    scaling: float,
) -> torch.Tensor:
    """Attend from queries that are the last tokens among their keys."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == num_keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    # A single query at the end of its path attends to all of it and needs no mask.
    mask = masks.lower_right(num_queries, num_keys, query) if num_queries > 1 else None
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _gathered(states: torch.Tensor, index: torch.Tensor | None, group: int) -> torch.Tensor:
    if index is not None:
        states = states.index_select(2, index)
    return states.repeat_interleave(group, dim=1)


SDPA = register_backend(SDPABackend())
