"""Attention over token trees with torch's own kernels, on any device.

On CPU, the kernel's normalizers are available and segments need no masks (see `segments`). Other
devices call SDPA for one block of queries at a time, with the gathered keys of the block's path.
These kernels do not support capped scores, nor sinks on other devices: such blocks compute the
softmax explicitly. Nothing is N x N.

Shape legend as in `backend`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from agentrl.data.rows import PackedRow
from agentrl.models.attention.backend import AttentionVariant, register_backend
from agentrl.models.attention.layout import attention_layout, whole_images
from agentrl.models.attention.segments import Segment, attend_along_segments, segments_of

MAX_BLOCK = 512
"""Most queries in a block; bounds the mask of a block to MAX_BLOCK x path length."""


class BlockMasks:
    """Masks for blocks whose queries are the last of their keys, created on first use.

    The masks are additive and have the queries' dtype. SDPA would convert a bool mask to such a mask
    in every layer and keep every copy for the backward pass.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._masks: dict[tuple[int, int, bool], torch.Tensor] = {}

    def lower_right(
        self, num_queries: int, num_keys: int, like: torch.Tensor, *, is_whole: bool = False
    ) -> torch.Tensor | None:
        """Return a mask [num_queries, num_keys] with the device and dtype of `like`.

        None: all queries attend to all keys, as does a single query at the end of its path.

        Args:
            num_queries: of the block.
            num_keys: of the block.
            like: the queries.
            is_whole: the queries see one another.
        """
        if num_queries == 1 or (is_whole and num_keys <= (self._window or num_keys)):
            return None
        shape = (num_queries, num_keys, is_whole)
        if shape not in self._masks:
            before = num_keys - num_queries
            infinite = torch.full(shape[:2], -torch.inf, dtype=like.dtype, device=like.device)
            mask = torch.zeros_like(infinite) if is_whole else infinite.triu(diagonal=before + 1)
            if self._window is not None:
                mask += infinite.tril(diagonal=before - self._window)
            self._masks[shape] = mask
        return self._masks[shape]


@dataclass(frozen=True)
class BlockLayout:
    """An `AttentionLayout` on a device."""

    query_lengths: list[int]
    key_lengths: list[int]
    key_index: torch.Tensor | None
    """int64 [total keys]; None if every block attends only to its own tokens."""
    whole: tuple[bool, ...]
    """Blocks whose own tokens see one another."""
    masks: BlockMasks
    """Shared by all layers of a window."""
    window: int | None


class RowLayout:
    """The segments or the blocks of a row, depending on what a layer needs."""

    def __init__(
        self, row: PackedRow, device: torch.device, num_above: int, window: int | None
    ) -> None:
        self._row = row
        self._device = device
        self._num_above = num_above
        self._window = window

    @property
    def has_segments(self) -> bool:
        """Whether the device's kernel returns the normalizers that segments need.

        Segments see all of their own tokens, so an image longer than the window is not a segment.
        """
        lengths = np.diff(whole_images(self._row), axis=1)
        images_fit = self._window is None or int(lengths.max(initial=0)) <= self._window
        return self._device.type == "cpu" and images_fit

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The row as segments, none of them longer than the window."""
        layout = attention_layout(
            self._row, max_block=self._window, num_above=self._num_above, window=self._window
        )
        return segments_of(layout, self._window)

    @cached_property
    def blocks(self) -> BlockLayout:
        """The row as blocks with masks."""
        return block_layout(self._row, self._device, self._num_above, self._window)


class SDPABackend:
    """Segments without masks on CPU, blocks with masks elsewhere."""

    flag = "sdpa"
    implementation = "agentrl_tree"
    computes = frozenset({"sliding_window", "softcap", "s_aux"})

    def refusal(self, device: torch.device) -> str | None:
        """Return None: SDPA runs on every device."""
        return None

    def layout(
        self,
        row: PackedRow,
        device: torch.device,
        num_above: int = 0,
        window: int | None = None,
    ) -> RowLayout:
        """Return the row's segments and blocks, created when a layer needs them."""
        return RowLayout(row, device, num_above, window)

    def is_traceable(self, layout: RowLayout) -> bool:
        """Return False: the calls depend on the tree."""
        return False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        variant: AttentionVariant,
        layout: RowLayout,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if layout.has_segments and variant.softcap is None:
            output = attend_along_segments(
                query, key, value, layout.segments, variant.scaling, variant.s_aux
            )
            return output.transpose(1, 2)
        return attend_by_blocks(query, key, value, layout.blocks, variant)


def block_layout(
    row: PackedRow,
    device: torch.device,
    num_above: int = 0,
    window: int | None = None,
    *,
    max_block: int = MAX_BLOCK,
) -> BlockLayout:
    """Return the blocks of a row on a device; see `attention_layout` for the arguments."""
    layout = attention_layout(row, max_block=max_block, num_above=num_above, window=window)
    is_local = layout.key_lengths == layout.query_lengths
    return BlockLayout(
        query_lengths=list(layout.query_lengths),
        key_lengths=list(layout.key_lengths),
        key_index=None if is_local else torch.from_numpy(layout.key_index).to(device),
        whole=layout.whole,
        masks=BlockMasks(window),
        window=window,
    )


def attend_by_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    variant: AttentionVariant,
) -> torch.Tensor:
    """Return the attention output [1, N, H, D], computed block by block."""
    group = query.shape[1] // key.shape[1]
    # One gather for all blocks, so the backward pass is one index_add. A gather per block would
    # allocate a gradient of the whole row for each block.
    keys, values = (_gather(states, layout.key_index, group) for states in (key, value))
    outputs = [
        _block_attention(q, k, v, layout, variant, is_whole=is_whole)
        for q, k, v, is_whole in zip(
            torch.split(query, layout.query_lengths, dim=2),
            torch.split(keys, layout.key_lengths, dim=2),
            torch.split(values, layout.key_lengths, dim=2),
            layout.whole,
            strict=True,
        )
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: BlockLayout,
    variant: AttentionVariant,
    *,
    is_whole: bool,
) -> torch.Tensor:
    """Return the attention of queries that are the last tokens among their keys."""
    num_queries, num_keys, scaling = query.shape[2], key.shape[2], variant.scaling
    mask = layout.masks.lower_right(num_queries, num_keys, query, is_whole=is_whole)
    if variant.softcap is not None or variant.s_aux is not None:
        return _explicit_attention(query, key, value, mask, variant)
    if is_whole and mask is None:
        return scaled_dot_product_attention(query, key, value, scale=scaling)
    if not is_whole and num_queries == num_keys <= (layout.window or num_keys):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    variant: AttentionVariant,
) -> torch.Tensor:
    scores = query @ key.transpose(2, 3) * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    if mask is not None:
        scores = scores + mask
    if variant.s_aux is not None:
        sinks = variant.s_aux.to(scores.dtype)[None, :, None, None]
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=exact).to(query.dtype)
    return weights[..., : key.shape[2]] @ value


def _gather(states: torch.Tensor, index: torch.Tensor | None, group: int) -> torch.Tensor:
    if index is not None:
        states = states.index_select(2, index)
    return states.repeat_interleave(group, dim=1)


SDPA = register_backend(SDPABackend())
