"""Attention over token trees through FlexAttention, for CUDA.

Token k is visible to token q exactly if `k <= q < ends[k]`, so one vector of integers defines the
whole mask, and its extremes within each block decide which blocks the kernel visits. Nothing is
N x N: the largest array has one entry per *pair of blocks*. FlexAttention has no backward pass on
CPU.

Shape legend as in `backend`.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from agentrl.data.rows import BLOCK, PackedRow, key_ends, plan_blocks
from agentrl.models.attention.backend import AttentionVariant, register_backend, unless_cuda
from agentrl.models.torch_features import has_keyword, with_recompile_limit

_KERNEL_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True, "IS_DIVISIBLE": True}
"""Rows of fewer than 128 tokens would otherwise use torch's kernel for decoding, which does not
compile with windows and capped scores. Queries and keys are padded to whole blocks, which a kernel
for every length cannot know: without bounds to check, it takes a fifth less time."""
_MOST_KERNELS = 64
"""Windows, capped scores, chunks and passes without gradients have their own kernels."""


class FlexBackend:
    """Attention with a block mask, compiled into one kernel."""

    flag = "flex"
    implementation = "agentrl_flex"
    computes = frozenset({"sliding_window", "softcap", "s_aux"})

    def refusal(self, device: torch.device) -> str | None:
        """Refuse devices other than CUDA."""
        return unless_cuda(device)

    def layout(
        self,
        row: PackedRow,
        device: torch.device,
        num_above: int = 0,
        window: int | None = None,
    ) -> BlockMask:
        """Build the block mask from the intervals of the row's subtrees."""
        ends = key_ends(row, num_above)
        plan = plan_blocks(ends, num_above)
        num_queries, num_keys = _whole_blocks(row.num_tokens), _whole_blocks(len(ends))
        # No query sees padding, whose ends are 0; the arrays also cover the padded queries.
        padding = (0, max(num_keys, num_above + num_queries) - len(ends))
        ends_device = torch.from_numpy(np.pad(ends, padding)).to(device)
        depths = np.concatenate([np.arange(num_above), row.positions])
        depths_device = torch.from_numpy(np.pad(depths, padding)).to(device)

        def visible(
            batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            position = query + num_above
            on_path = (key <= position) & (position < ends_device[key])
            if window is None:
                return on_path
            return on_path & (depths_device[position] - depths_device[key] < window)

        # A window may end within any block, so the kernel evaluates the mask in all of them.
        is_full = plan.full if window is None else np.zeros_like(plan.full)
        partial_counts, partial_indices = _block_lists(
            plan.partial | (plan.full & ~is_full), device
        )
        full_counts, full_indices = _block_lists(is_full, device)
        return BlockMask.from_kv_blocks(
            partial_counts,
            partial_indices,
            full_counts,
            full_indices,
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(num_queries, num_keys),
        )

    def is_traceable(self, layout: BlockMask) -> bool:
        """Return True: a row's tree is data of its mask."""
        return True

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        variant: AttentionVariant,
        layout: BlockMask,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        # A compiled layer contains the kernel. Uncompiled, FlexAttention computes all N x N scores;
        # tests on CPU check masks with it.
        needs_compiling = query.is_cuda and not torch.compiler.is_compiling()
        kernel = _compiled() if needs_compiling else flex_attention
        num_queries = query.shape[2]
        result = kernel(
            *(_padded(states) for states in (query, key, value)),
            score_mod=None if variant.softcap is None else _softcap(variant.softcap, query.device),
            block_mask=layout,
            scale=variant.scaling,
            enable_gqa=True,
            return_aux=None if variant.s_aux is None else AuxRequest(lse=True),
            kernel_options=_KERNEL_OPTIONS,
        )
        if variant.s_aux is None:
            output: torch.Tensor = result
        else:
            # A sink has a share of the softmax, which the values lose.
            values, extra = result
            sinks = variant.s_aux.to(extra.lse.dtype)[None, :, None]
            output = values * torch.sigmoid(extra.lse - sinks)[..., None].to(values.dtype)
        return output[:, :, :num_queries].transpose(1, 2)


def _whole_blocks(num_tokens: int) -> int:
    """Return the number of tokens rounded up to whole blocks."""
    return -(-num_tokens // BLOCK) * BLOCK


def _padded(states: torch.Tensor) -> torch.Tensor:
    """Pad queries, keys or values [1, heads, tokens, D] to whole blocks."""
    num_tokens = states.shape[2]
    return pad(states, (0, 0, 0, _whole_blocks(num_tokens) - num_tokens))


def _softcap(softcap: float, device: torch.device) -> Any:
    # A tensor: with dynamic shapes, torch makes a float an input that the kernel cannot read.
    bound = torch.full((), softcap, device=device)

    def cap(score: torch.Tensor, *_indices: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / bound) * bound

    return cap


def _block_lists(blocks: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the selected key blocks of each query block, in FlexAttention's format.

    Args:
        blocks: bool [Q, K], query blocks by key blocks.
        device: of the result.

    Returns:
        Counts int32 [1, 1, Q], and indices int32 [1, 1, Q, K] of which the first `count` are used.
    """
    counts = blocks.sum(axis=1).astype(np.int32)
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return (
        torch.from_numpy(counts)[None, None].to(device),
        torch.from_numpy(indices)[None, None].to(device),
    )


@cache
def _compiled() -> Any:
    # Dynamic shapes: rows differ in length, and compiling for each length would take many seconds. A
    # full graph: beyond the limit, torch would compute all N x N scores; now it raises an error.
    compile_: Any = torch.compile  # the types of its overloads lack `recompile_limit`
    if has_keyword(torch.compile, "recompile_limit"):
        return compile_(flex_attention, dynamic=True, fullgraph=True, recompile_limit=_MOST_KERNELS)
    return with_recompile_limit(
        compile_(flex_attention, dynamic=True, fullgraph=True), _MOST_KERNELS
    )


FLEX = register_backend(FlexBackend())
