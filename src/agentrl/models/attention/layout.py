"""Where each token of a `PackedRow` may look: segments of queries and the keys on their path.

A *segment* is a maximal stretch of the row in which every token is the first child of the one before
it. Its queries see the path above the segment (whole) and the segment itself (causally). Where that takes a
mask, long segments are cut into blocks, so that no mask grows with the square of the row.
"""

from dataclasses import dataclass

import numpy as np

from agentrl.data.rows import PackedRow


@dataclass(frozen=True)
class AttentionLayout:
    """Blocks of queries, in row order, and the keys of each.

    Block b holds the next `query_lengths[b]` tokens of the row; its keys are the next
    `key_lengths[b]` entries of `key_index`, of which the last `query_lengths[b]` are the block's
    own tokens (causal) and all before are ancestors (visible in full).
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_index: np.ndarray
    """int64 [sum of key_lengths], indices into the row (after the tokens above it, if any)."""


def attention_layout(
    row: PackedRow, *, max_block: int | None = None, num_above: int = 0
) -> AttentionLayout:
    """Return the blocks of a row.

    Args:
        row: N tokens in depth-first preorder.
        max_block: longest block of queries that have a path above them; None: every segment is one.
        num_above: where the row is a chunk of a longer one, the tokens on the path above its first
            token. They come before the row's own tokens in the keys.
    """
    starts = segment_starts(row)
    ends = np.append(starts[1:], row.num_tokens)
    path = np.empty(int(row.positions.max(initial=-1)) + 1, dtype=np.int64)
    path[:num_above] = np.arange(num_above)
    query_lengths: list[int] = []
    keys: list[np.ndarray] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        depth = int(row.positions[start])
        path[depth : depth + end - start] = np.arange(start, end) + num_above
        size = end - start if max_block is None or depth == 0 else max_block
        for first in range(start, end, size):
            last = min(first + size, end)
            query_lengths.append(last - first)
            keys.append(path[: depth + last - start].copy())
    return AttentionLayout(
        query_lengths=tuple(query_lengths),
        key_lengths=tuple(len(index) for index in keys),
        key_index=np.concatenate(keys) if keys else np.empty(0, dtype=np.int64),
    )


def segment_starts(row: PackedRow) -> np.ndarray:
    """Return the first index of every segment, int64 [number of segments].

    In preorder the token after k is k's child exactly when it lies in k's subtree.
    """
    if row.num_tokens == 0:
        return np.empty(0, dtype=np.int64)
    indices = np.arange(1, row.num_tokens)
    return np.concatenate([[0], indices[row.subtree_ends[:-1] <= indices]])


def visibility(row: PackedRow) -> np.ndarray:
    """Return the dense mask, bool [N, N]: entry (q, k) says whether q sees k."""
    index = np.arange(row.num_tokens)
    after = index[:, None] >= index[None, :]
    inside: np.ndarray = after & (index[:, None] < row.subtree_ends[None, :])
    return inside
