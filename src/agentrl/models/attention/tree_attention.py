"""Attention over token trees, plugged into transformers' attention interface.

`tree_attention` is registered under `TREE_ATTENTION`. transformers hands it queries, keys and
values after the rotary embedding and passes the keyword `tree_layout` through every layer, so no
model code is forked. Each block of queries attends to the keys of its own path; nothing is
N x N. On CPU, whose kernel is known, runs need no masks (`models.runs`); other devices go through
SDPA block by block. Eager attention with a bool mask is silently wrong in transformers and is not
offered.

Shape legend: H query heads, K key-value heads, N tokens, D head dimension; batch is always 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.data.rows import PackedRow
from agentrl.models.attention.layout import AttentionLayout, attention_layout
from agentrl.models.attention.segments import Run, attend_along_runs
from agentrl.models.split import over_ranks

TREE_ATTENTION = "agentrl_tree"
MAX_BLOCK = 512
"""Queries of one block at most. Bounds the mask of a block to MAX_BLOCK x path length."""


class ChunkStates:
    """Keys and values that pass between the chunks of a row, after the rotary embedding.

    Shapes are [1, K, P, D] above, P tokens on the path of the chunk's first one, and [1, K, N, D]
    for what the chunk makes itself. Not a dataclass: FSDP2 rebuilds those on their way into every
    layer, and what a layer notes would be lost in the copy.
    """

    def __init__(self, above: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start a chunk.

        Args:
            above: keys and values of the tokens above the chunk, a pair a layer.
        """
        self.above = above
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of the chunk's own tokens by layer, as its forward pass makes them."""

    def extend(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note a layer's own keys and values and put those above in front of them."""
        self.made[layer] = (key, value)
        if not self.above:
            return key, value
        key_above, value_above = self.above[layer]
        return torch.cat([key_above, key], dim=2), torch.cat([value_above, value], dim=2)


class CausalMasks:
    """Masks of blocks whose queries are the last of their keys, each made when first asked for.

    Additive and in the queries' precision: SDPA would turn a bool mask into one in every layer, and
    keep them all for the backward pass. Not a dataclass, for the same reason as `ChunkStates`.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def lower_right(self, num_queries: int, num_keys: int, like: torch.Tensor) -> torch.Tensor:
        """Return a mask [num_queries, num_keys] with the device and precision of `like`."""
        shape = (num_queries, num_keys)
        if shape not in self._made:
            hidden = torch.full(shape, -torch.inf, dtype=like.dtype, device=like.device)
            self._made[shape] = hidden.triu(diagonal=num_keys - num_queries + 1)
        return self._made[shape]


@dataclass(frozen=True)
class DeviceLayout:
    """An `AttentionLayout` with what attention needs on the device, made once a row."""

    query_lengths: list[int]
    key_lengths: list[int]
    key_index: torch.Tensor | None
    """int64 [total keys]; None when every block sees just its own tokens."""
    masks: CausalMasks
    """Shared by all layers."""
    runs: tuple[Run, ...] | None
    """The blocks as runs, on CPU."""
    states: ChunkStates | None = None
    """What the row shares with the chunks before it; None for a whole row."""

    @classmethod
    def build(
        cls,
        row: PackedRow,
        device: torch.device,
        states: ChunkStates | None = None,
        num_above: int = 0,
    ) -> "DeviceLayout":
        """Lay a row out for a device.

        Args:
            row: N tokens in depth-first preorder.
            device: where attention is computed.
            states: see above.
            num_above: tokens above the row, see `attention_layout`.
        """
        by_runs = _attends_by_runs(device)
        max_block = None if by_runs else MAX_BLOCK
        layout = attention_layout(row, max_block=max_block, num_above=num_above)
        alone = layout.key_lengths == layout.query_lengths
        return cls(
            query_lengths=list(layout.query_lengths),
            key_lengths=list(layout.key_lengths),
            key_index=None if alone else torch.from_numpy(layout.key_index).to(device),
            masks=CausalMasks(),
            runs=_runs(layout) if by_runs else None,
            states=states,
        )


def _attends_by_runs(device: torch.device) -> bool:
    return device.type == "cpu"


def _runs(layout: AttentionLayout) -> tuple[Run, ...]:
    runs, first, used = [], 0, 0
    for queries, keys in zip(layout.query_lengths, layout.key_lengths, strict=True):
        above = layout.key_index[used : used + keys - queries]
        runs.append(
            Run(
                queries=slice(first, first + queries),
                above=torch.from_numpy(above) if len(above) else None,
            )
        )
        first, used = first + queries, used + keys
    return tuple(runs)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    tree_layout: DeviceLayout,
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
        tree_layout: blocks of the row.

    Returns:
        The attention output [1, N, H, D] and None for the weights.
    """
    query, key, value = with_kept_states(module, tree_layout.states, query, key, value)
    if tree_layout.runs is not None:
        output = attend_along_runs(query, key, value, tree_layout.runs, scaling)
        return output.transpose(1, 2), None
    group = query.shape[1] // key.shape[1]
    # One gather for all blocks: its backward is one index_add. A gather a block would fill a
    # whole-row gradient for each of them.
    keys = _gathered(key, tree_layout.key_index, group)
    values = _gathered(value, tree_layout.key_index, group)
    outputs = [
        _block_attention(q, k, v, tree_layout.masks, scaling)
        for q, k, v in zip(
            torch.split(query, tree_layout.query_lengths, dim=2),
            torch.split(keys, tree_layout.key_lengths, dim=2),
            torch.split(values, tree_layout.key_lengths, dim=2),
            strict=True,
        )
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: CausalMasks,
    scaling: float,
) -> torch.Tensor:
    """Attend from queries that are the last of their keys."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == num_keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    # A single query at the end of its path sees all of it.
    mask = masks.lower_right(num_queries, num_keys, query) if num_queries > 1 else None
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def with_kept_states(
    module: torch.nn.Module,
    states: ChunkStates | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what an attention layer attends with: one precision, and earlier chunks' keys first.

    Args:
        module: the attention layer.
        states: keys and values of the chunks above the row, if it has any.
        query: [1, H, N, D] after the rotary embedding.
        key: [1, K, N, D].
        value: [1, K, N, D].

    Returns:
        Queries [1, H, N, D], keys and values [1, K, P + N, D] with P tokens above the row.
    """
    query, key, value = (_in_one_precision(tensor) for tensor in (query, key, value))
    if states is not None:
        index = module.layer_idx
        assert isinstance(index, int), "transformers numbers its attention layers"
        key, value = states.extend(index, key, value)
    return query, key, value


def _in_one_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Return queries, keys or values in the precision that autocast asks for.

    Norms and rotary embedding leave queries and keys in float32, values come in bfloat16. Kernels
    want one precision, and what is kept for other chunks should take no more room than it has to.
    """
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _gathered(states: torch.Tensor, index: torch.Tensor | None, group: int) -> torch.Tensor:
    if index is not None:
        states = states.index_select(2, index)
    return states.repeat_interleave(group, dim=1)


AttentionInterface.register(TREE_ATTENTION, over_ranks(tree_attention))
