"""Which blocks of a row's attention matrix hold a visible pair, from the row's intervals alone.

Arrays only, no torch.
"""

from dataclasses import dataclass

import numpy as np

from agentrl.data.rows import PackedRow

BLOCK = 128


@dataclass(frozen=True)
class BlockPlan:
    """Which blocks of keys a block of queries meets, bool [query blocks, key blocks] each."""

    partial: np.ndarray
    """Some pairs are visible, so the mask has to be asked."""
    full: np.ndarray
    """All pairs are visible."""

    @property
    def num_visited(self) -> int:
        """Return the number of blocks that the kernel computes."""
        return int(self.partial.sum() + self.full.sum())


def key_ends(row: PackedRow, num_above: int = 0) -> np.ndarray:
    """Return the end of every key's visibility, int32 [P + N].

    Keys are the P tokens above the row and then its own; queries count from P.
    """
    # A token at depth d above the row is out of sight from the first token on whose depth is at
    # most d: the path has left it then.
    lowest = np.minimum.accumulate(row.positions)
    above = np.searchsorted(-lowest, -np.arange(num_above), side="left")
    return (np.concatenate([above, row.subtree_ends]) + num_above).astype(np.int32)


def plan_blocks(ends: np.ndarray, num_above: int = 0, *, block: int = BLOCK) -> BlockPlan:
    """Return the blocks that have to be visited.

    Args:
        ends: of all keys, see `key_ends`.
        num_above: P.
        block: tokens of a block of queries or keys.
    """
    num_keys = len(ends)
    key_first = np.arange(0, num_keys, block)
    key_last = np.minimum(key_first + block, num_keys) - 1
    query_first = np.arange(num_above, num_keys, block)
    query_last = np.minimum(query_first + block, num_keys) - 1
    highest = np.maximum.reduceat(ends, key_first)
    lowest = np.minimum.reduceat(ends, key_first)
    visited = (key_first <= query_last[:, None]) & (highest > query_first[:, None])
    full = (key_last <= query_first[:, None]) & (lowest > query_last[:, None])
    # Where a block sticks out over the end of the row, the mask decides.
    full &= (key_first + block <= num_keys) & (query_first + block <= num_keys)[:, None]
    return BlockPlan(partial=visited & ~full, full=full)
