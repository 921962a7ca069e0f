"""The keys that each token of a `PackedRow` attends to, as segments of queries and their paths.

A *segment* is a maximal stretch of the row in which every token is the first child of the token
before it. Its queries attend to the whole path above the segment and causally to the segment itself.
For kernels that need a mask, long segments are cut into blocks, which bounds the size of a mask.
Works on arrays, independent of tensors and devices.
"""

from dataclasses import dataclass

import numpy as np

from agentrl.data.rows import PackedRow
from agentrl.models.rows.row_tree import segment_starts


@dataclass(frozen=True)
class AttentionLayout:
    """Blocks of queries, in row order, and the keys of each.

    Blocks are consecutive. Block b has `query_lengths[b]` queries and `key_lengths[b]` entries of
    `key_index`; the last `query_lengths[b]` of these are the block's own tokens (causal), and the
    others are ancestors (fully visible, unless a window ends within them).
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    key_index: np.ndarray
    """int64 [sum of key_lengths], indices into the row (after the tokens above it, if any)."""
    whole: tuple[bool, ...]
    """Whether a block's own tokens see one another in both directions, as those of an image may. Such
    a block is never cut."""


def attention_layout(
    row: PackedRow,
    *,
    max_block: int | None = None,
    num_above: int = 0,
    window: int | None = None,
) -> AttentionLayout:
    """Return the blocks of a row.

    Args:
        row: N tokens in depth-first preorder.
        max_block: upper bound on the queries of a block with a path above it; None: one block per
            segment. Without a window, blocks at a root need no mask and are never cut.
        num_above: tokens on the path above the row if it is a chunk, else 0. They precede the row's
            own tokens in the keys.
        window: most tokens that a query sees; keys that no query of a block sees are left out.
    """
    starts = segment_starts(row)
    spans = whole_images(row)
    images = set(spans[:, 0].tolist())
    starts = np.unique(np.concatenate([starts, spans.flatten()]))
    starts = starts[starts < row.num_tokens]
    ends = np.append(starts[1:], row.num_tokens)
    # `path[d]` is the key at depth d on the path to the current segment. A segment overwrites the
    # entries from its depth on; in preorder those above it are its ancestors.
    path = np.empty(int(row.positions.max(initial=-1)) + 1, dtype=np.int64)
    path[:num_above] = np.arange(num_above)
    query_lengths: list[int] = []
    keys: list[np.ndarray] = []
    whole: list[bool] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        depth = int(row.positions[start])
        path[depth : depth + end - start] = np.arange(start, end) + num_above
        is_image = start in images
        is_whole = is_image or max_block is None or (depth == 0 and window is None)
        size = end - start if is_whole or max_block is None else max_block
        for first in range(start, end, size):
            last = min(first + size, end)
            query_lengths.append(last - first)
            whole.append(is_image)
            depth_first, depth_last = depth + first - start, depth + last - start
            nearest = 0 if window is None else max(0, depth_first - window + 1)
            keys.append(path[nearest:depth_last].copy())
    return AttentionLayout(
        query_lengths=tuple(query_lengths),
        key_lengths=tuple(len(index) for index in keys),
        key_index=np.concatenate(keys) if keys else np.empty(0, dtype=np.int64),
        whole=tuple(whole),
    )


def whole_images(row: PackedRow) -> np.ndarray:
    """Return the spans of images whose tokens see one another, int64 [images, 2]."""
    return np.empty((0, 2), dtype=np.int64) if row.images is None else row.images.whole_spans
