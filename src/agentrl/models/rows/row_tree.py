"""`RowTree`: a row as a tree of segments, for layers that carry a state along a path.

For attention, a segment is a stretch of the row in which every token is the first child of the one
before it (`segment_starts`). A recurrent layer must be able to run over a segment without choosing
between states: its segments are also cut after every token from which a later one starts, and after
the tokens whose states a later chunk continues. Segments that do not depend on one another form a
*round*: one call of the layer.

Answers often share their first few tokens by chance. A *stub*, a few tokens before a branch, forms
no round of its own, which would add a call a layer for each such branch on a path: each of its
children begins with a copy of it. The first child's copy stands for the stub in the output.

Works on arrays, independent of tensors and layers.

Shape legend: N tokens of the row, P tokens on the path above it (the row is a chunk), S segments of a
round, L tokens of the longest, O tokens of its output, I tokens above whose states the row continues,
E own tokens whose states a later chunk continues. Indices of keys count the P tokens above first.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from agentrl.data.rows import PackedRow

_SHORT_SEGMENT = 64
"""Segments up to this length share a call; longer ones only with those of half to twice their length,
since a call pads its segments to the longest."""
_LONGEST_STUB = 16
"""Tokens that a segment repeats at most from stubs above it. Scans work in chunks of 64 tokens, so
most of these tokens replace padding."""


@dataclass(frozen=True, eq=False)
class Round:
    """Segments that are computed together."""

    tokens: np.ndarray
    """int64 [S, L], tokens of each, copies of stubs first; N after its end."""
    outputs: np.ndarray
    """int64 [O], the places in `tokens`, flattened, whose outputs are those of the row."""
    parents: np.ndarray
    """int64 [S], number of the state that each continues: 0 is the state before a path, 1 to I are
    those of `imports`, and the others are the final states of the segments of earlier rounds, in
    order.
    """


@dataclass(frozen=True, eq=False)
class RowTree:
    """The segments of a row."""

    parents: np.ndarray
    """int64 [N], the key before each token on its path; -1 at a root."""
    imports: np.ndarray
    """int64 [I], keys above the row whose states it continues, in ascending order."""
    rounds: tuple[Round, ...]
    exports: np.ndarray
    """int64 [E], numbers of the states that later chunks continue."""
    num_above: int
    _ancestors: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls, row: PackedRow, num_above: int = 0, exported: np.ndarray | tuple[int, ...] = ()
    ) -> Self:
        """Cut a row into segments.

        Args:
            row: N tokens in depth-first preorder.
            num_above: P.
            exported: E own tokens whose states are requested, in ascending order.
        """
        parents = _parents(row, num_above)
        exported = np.asarray(exported, dtype=np.int64)
        is_first = parents != np.arange(row.num_tokens) + num_above - 1
        is_first[0] = True
        following = parents[is_first] - num_above + 1
        following = np.concatenate([following[following > 0], exported + 1])
        is_first[following[following < row.num_tokens]] = True
        starts = np.flatnonzero(is_first)
        ends = np.append(starts[1:], row.num_tokens)
        segment_of = np.cumsum(is_first) - 1
        above = parents[starts]
        imports = np.unique(above[(above >= 0) & (above < num_above)])
        # The segment above each; -1 if the state does not come from this row.
        owner = np.where(above >= num_above, segment_of[np.maximum(above - num_above, 0)], -1)
        segments = _Segments.placed(starts, ends, owner, exported=segment_of[exported])
        order, edges = segments.in_rounds()
        state_of = np.empty(len(starts), dtype=np.int64)
        state_of[order] = 1 + len(imports) + np.arange(len(order))
        is_imported = (above >= 0) & (above < num_above)
        continued = np.zeros(len(starts), dtype=np.int64)
        continued[is_imported] = 1 + np.searchsorted(imports, above[is_imported])
        continued[owner >= 0] = state_of[owner[owner >= 0]]
        continued = continued[segments.tops]
        return cls(
            parents=parents,
            imports=imports,
            rounds=tuple(
                Round(*segments.tokens(members, parents - num_above), continued[members])
                for members in np.split(order, edges)
            ),
            exports=state_of[segment_of[exported]],
            num_above=num_above,
        )

    def ancestors(self, count: int) -> np.ndarray:
        """Return each token's nearest keys on its path, itself last, int64 [count, N].

        P + N means that there is none, because the path is shorter.
        """
        if count not in self._ancestors:
            num_tokens = len(self.parents)
            no_key = self.num_above + num_tokens
            parent_of = np.concatenate([np.arange(self.num_above) - 1, self.parents, [no_key]])
            parent_of[parent_of < 0] = no_key
            keys = [np.arange(num_tokens) + self.num_above]
            for _ in range(count - 1):
                keys.append(parent_of[keys[-1]])
            self._ancestors[count] = np.stack(keys[::-1])
        return self._ancestors[count]


@dataclass(frozen=True, eq=False)
class _Segments:
    """Where the segments of a row are computed; all arrays have one entry for each."""

    starts: np.ndarray
    ends: np.ndarray
    is_stub: np.ndarray
    levels: np.ndarray
    """int64, segments above each on its path that are no stubs."""
    copied: np.ndarray
    """int64, tokens of stubs that each begins with."""
    tops: np.ndarray
    """int64, the segment whose state each continues: the first of those stubs, else its own."""

    @classmethod
    def placed(
        cls, starts: np.ndarray, ends: np.ndarray, owners: np.ndarray, *, exported: np.ndarray
    ) -> Self:
        """Find the stubs, and what they leave to their children."""
        has_children = np.bincount(owners[owners >= 0], minlength=len(starts)) > 0
        has_children[exported] = False  # a later chunk continues their states
        lengths = (ends - starts).tolist()
        is_stub = [False] * len(starts)
        levels, copied, tops = [0] * len(starts), [0] * len(starts), list(range(len(starts)))
        for segment, owner in enumerate(owners.tolist()):  # in preorder, owners come first
            if owner >= 0 and is_stub[owner]:
                levels[segment] = levels[owner]
                copied[segment] = copied[owner] + lengths[owner]
                tops[segment] = tops[owner]
            elif owner >= 0:
                levels[segment] = levels[owner] + 1
            is_short = copied[segment] + lengths[segment] <= _LONGEST_STUB
            is_stub[segment] = is_short and bool(has_children[segment])
        return cls(starts, ends, *map(np.array, (is_stub, levels, copied, tops)))

    def in_rounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the segments that are no stubs, round by round, and where rounds after the first begin."""
        lengths = np.maximum(self.ends - self.starts + self.copied, _SHORT_SEGMENT)
        sizes = np.ceil(np.log2(lengths)).astype(np.int64)
        order = np.lexsort((sizes, self.levels))
        order = order[~self.is_stub[order]]
        is_edge = (np.diff(self.levels[order]) != 0) | (np.diff(sizes[order]) != 0)
        return order, np.flatnonzero(is_edge) + 1

    def tokens(self, members: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a round's `tokens` and `outputs`.

        Args:
            members: its segments.
            parents: the token before each token of the row.
        """
        starts, ends, copied = self.starts[members], self.ends[members], self.copied[members]
        columns = np.arange((ends - starts + copied).max())
        tokens = (starts - copied)[:, None] + columns
        tokens[tokens >= ends[:, None]] = len(parents)
        token = starts
        for back in range(1, copied.max() + 1):
            token = np.where(copied >= back, parents[token], token)
            deep = np.flatnonzero(copied >= back)
            tokens[deep, copied[deep] - back] = token[deep]
        # Stubs that directly precede a segment in preorder are those of which it is the first child.
        follows_stub = np.append(False, self.is_stub[:-1])
        own = np.maximum.accumulate(np.where(follows_stub, 0, self.starts))[members]
        is_output = (columns >= (copied - starts + own)[:, None]) & (tokens < len(parents))
        return tokens, np.flatnonzero(is_output)


def segment_starts(row: PackedRow) -> np.ndarray:
    """Return the first index of every segment, int64 [number of segments].

    In preorder, the token after k is k's child exactly if it lies in k's subtree.
    """
    if row.num_tokens == 0:
        return np.empty(0, dtype=np.int64)
    indices = np.arange(1, row.num_tokens)
    return np.concatenate([[0], indices[row.subtree_ends[:-1] <= indices]])


def continued_keys(row: PackedRow, num_above: int) -> np.ndarray:
    """Return the keys above a chunk whose states its segments continue, int64 [I], ascending."""
    above = _parents(row, num_above)[segment_starts(row)]
    return np.unique(above[(above >= 0) & (above < num_above)])


def _parents(row: PackedRow, num_above: int) -> np.ndarray:
    parents = np.arange(row.num_tokens) + num_above - 1
    starts = segment_starts(row)
    ends = np.append(starts[1:], row.num_tokens)
    # As in `attention_layout`: `path[d]` is the key at depth d above the current segment.
    path = np.empty(int(row.positions.max(initial=-1)) + 1, dtype=np.int64)
    path[:num_above] = np.arange(num_above)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        depth = int(row.positions[start])
        parents[start] = path[depth - 1] if depth else -1
        path[depth : depth + end - start] = np.arange(start, end) + num_above
    return parents
