"""Cuts a row that is too long for one pass into chunks, in depth-first order."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from agentrl.data.rows import PackedRow
from agentrl.data.shown_images import RowImages
from agentrl.models.rows.row_tree import continued_keys


@dataclass(frozen=True, eq=False)
class RowChunk:
    """A part of a row, as a `PackedRow`."""

    row: PackedRow
    """The tokens at their positions in the whole row, and the targets whose source they are."""
    start: int
    """Index of its first token in the whole row."""
    above: np.ndarray
    """int64 [P], indices in the whole row of the tokens above its first token."""
    targets: np.ndarray
    """int64, indices of its targets in the whole row."""
    continued: np.ndarray
    """int64 [I], indices in the whole row of the tokens above whose states it continues."""
    exports: np.ndarray
    """int64 [E], indices in the chunk of the tokens whose states later chunks continue."""

    @cached_property
    def stretches_above(self) -> list[slice]:
        """`above` as slices of the row: its stretches between earlier branches."""
        ends = np.flatnonzero(np.diff(self.above) != 1) + 1
        return [
            slice(int(stretch[0]), int(stretch[-1]) + 1) for stretch in np.split(self.above, ends)
        ]

    @property
    def tokens(self) -> slice:
        """The slice of the whole row that the chunk's tokens fill."""
        return slice(self.start, self.start + self.row.num_tokens)

    @property
    def exported(self) -> np.ndarray:
        """The indices of `exports` in the whole row."""
        return self.exports + self.start


def cut_row(row: PackedRow, num_chunks: int) -> list[RowChunk | None]:
    """Cut a row into chunks of about the same length, and never through an image.

    The encoder produces an image as a whole, and in some families its tokens attend to one another.

    Returns:
        Exactly `num_chunks` entries. All ranks of a sharded model must make the same number of
        passes, because each pass gathers parameters; None is a pass without tokens.
    """
    edges = np.linspace(0, row.num_tokens, min(num_chunks, row.num_tokens) + 1).astype(np.int64)
    if row.images is not None:
        for start, end in row.images.spans.tolist():
            edges[(edges > start) & (edges < end)] = start
        edges = np.unique(edges)
    chunks = [
        _chunk(row, start, end)
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    exports = np.unique(np.concatenate([chunk.continued for chunk in chunks]))
    cut: list[RowChunk | None] = [
        replace(chunk, exports=exports[(exports >= start) & (exports < end)] - start)
        for chunk, start, end in zip(chunks, edges[:-1], edges[1:], strict=True)
    ]
    return cut + [None] * (num_chunks - len(chunks))


def _chunk(row: PackedRow, start: int, end: int) -> RowChunk:
    targets = np.flatnonzero((row.sources >= start) & (row.sources < end))
    shown = [] if row.images is None else row.images.placed
    images = RowImages.of([(at - start, image) for at, image in shown if start <= at < end])
    rotary = None if row.rotary_positions is None else row.rotary_positions[:, start:end]
    part = PackedRow(
        token_ids=row.token_ids[start:end],
        positions=row.positions[start:end],
        subtree_ends=np.minimum(row.subtree_ends[start:end], end) - start,
        sources=row.sources[targets] - start,
        targets=row.targets[targets],
        temperatures=row.temperatures[targets],
        routed_experts=None if row.routed_experts is None else row.routed_experts[start:end],
        images=images,
        rotary_positions=rotary,
        stand_in=row.stand_in,
    )
    # In preorder, every earlier token that a token of the chunk can see is an ancestor of the chunk's
    # first token, so these are all the keys that the chunk needs.
    above = np.flatnonzero(row.subtree_ends[:start] > start)
    return RowChunk(
        row=part,
        start=start,
        above=above,
        targets=targets,
        continued=above[continued_keys(part, len(above))],
        exports=np.empty(0, dtype=np.int64),
    )
