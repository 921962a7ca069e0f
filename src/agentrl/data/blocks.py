"""The blocks of a row's attention matrix that hold a visible pair.

Input: a row's subtree intervals. Output: a plan per block, without an N x N mask. The plan drives
FlexAttention's kernel and counts its work. Arrays only, no torch.

Shape legend: N tokens of the row, P tokens above it.
"""

from dataclasses import dataclass

import numpy as np

from agentrl.data.rows import PackedRow

BLOCK = 128
"""Queries, and keys, per block: FlexAttention's default."""


@dataclass(frozen=True)
class BlockPlan:
    """The blocks with visible pairs; both fields are bool [query blocks, key blocks]."""

    partial: np.ndarray
    """Some pairs are visible; the kernel evaluates the mask."""
    full: np.ndarray
    """All pairs are visible; the kernel skips the mask."""

    @property
    def num_visited(self) -> int:
        """The number of blocks that the kernel computes."""
        return int(self.partial.sum() + self.full.sum())


def key_ends(row: PackedRow, num_above: int = 0) -> np.ndarray:
    """Return for each key the index of the first later query that cannot see it, int32 [P + N].

    Keys are the P tokens above the row, then the row's own; query i of the row has the index P + i.
    """
    # An ancestor at depth d is visible until the first token of the row whose depth is at most d.
    # `min_depths` decreases monotonically, so a binary search finds that token.
    min_depths = np.minimum.accumulate(row.positions)
    above = np.searchsorted(-min_depths, -np.arange(num_above), side="left")
    return (np.concatenate([above, row.subtree_ends]) + num_above).astype(np.int32)


def plan_blocks(ends: np.ndarray, num_above: int = 0, *, block: int = BLOCK) -> BlockPlan:
    """Return the blocks that attention must visit.

    Args:
        ends: int32 [P + N], see `key_ends`.
        num_above: P.
        block: number of queries, and of keys, per block.
    """
    num_keys = len(ends)
    key_first = np.arange(0, num_keys, block)
    key_last = np.minimum(key_first + block, num_keys) - 1
    query_first = np.arange(num_above, num_keys, block)
    query_last = np.minimum(query_first + block, num_keys) - 1
    max_ends = np.maximum.reduceat(ends, key_first)
    min_ends = np.minimum.reduceat(ends, key_first)
    visited = (key_first <= query_last[:, None]) & (max_ends > query_first[:, None])
    full = (key_last <= query_first[:, None]) & (min_ends > query_last[:, None])
    # Blocks that extend beyond the row contain padding, which only the mask hides.
    full &= (key_first + block <= num_keys) & (query_first + block <= num_keys)[:, None]
    return BlockPlan(partial=visited & ~full, full=full)
