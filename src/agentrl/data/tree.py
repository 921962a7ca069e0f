"""`TokenTree`: the turns of a group as a prefix tree of token ids as sampled.

Paths are sorted lexicographically. Then a path's new tokens are those after what it shares with
its neighbour before it, and writing the new tokens one after the other *is* the depth-first
preorder of the compressed trie. A turn whose tokens a later turn repeats adds nothing.

Loss terms are kept as a flat list beside the tree, one a (turn, sampled token). Two samples that
drew the same token after the same context share its node and have two terms; a token that one turn
sampled and another merely has in its prompt has one. Masks, advantages and normalisers belong to
terms, never to nodes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from agentrl.data.tokens import TurnTokens, shared_lengths, turn_tokens
from agentrl.models.rows import PackedRow
from agentrl.schema import DispatchedSamplingTask

Merge = Literal["tree", "linear", "none"]


@dataclass(frozen=True, eq=False)
class Branch:
    """A turn in its place in depth-first order."""

    turn: TurnTokens
    shared: int
    """Leading tokens of its path that the branch before it has already laid down."""

    @property
    def length(self) -> int:
        """Return the length of the path."""
        return len(self.turn.prompt_ids) + len(self.turn.output_ids) - 1


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A forest in depth-first preorder: N tokens, T loss terms, B branches (turns)."""

    branches: tuple[Branch, ...]

    @classmethod
    def from_turns(cls, turns: Iterable[DispatchedSamplingTask]) -> "TokenTree":
        """Merge all turns of a group (every record, every turn, edited contexts too).

        Args:
            turns: all turns of one attempt of each record, in any order.
        """
        return cls.from_tokens(turn_tokens(turns))

    @classmethod
    def from_tokens(cls, turns: Sequence[TurnTokens], *, merge: Merge = "tree") -> "TokenTree":
        """Merge turns that are already in token form.

        Args:
            turns: in any order; equal input sets give equal trees.
            merge: `tree` shares every common prefix; `linear` only lets a turn absorb one of the
                same record that it extends; `none` gives every turn its own row.
        """
        if merge == "none":
            return cls(tuple(Branch(turn, 0) for turn in turns))
        if merge == "linear":
            records = sorted({turn.record_id for turn in turns})
            return cls(
                tuple(
                    branch
                    for record_id in records
                    for branch in _chains([t for t in turns if t.record_id == record_id])
                )
            )
        return cls(tuple(_sorted_branches(turns)))

    @cached_property
    def row(self) -> PackedRow:
        """Return the tokens in depth-first preorder and the terms in branch order."""
        return lay_out(self.branches)

    @property
    def token_ids(self) -> np.ndarray:
        """Return the distinct tokens, int64 [N]."""
        return self.row.token_ids

    @property
    def positions(self) -> np.ndarray:
        """Return the depth of each token, int64 [N]."""
        return self.row.positions

    @property
    def subtree_ends(self) -> np.ndarray:
        """Return the index after each token's last descendant, int64 [N]."""
        return self.row.subtree_ends

    @property
    def num_tokens(self) -> int:
        """Return N without laying the tree out."""
        return sum(branch.length - branch.shared for branch in self.branches)

    @property
    def num_flat_tokens(self) -> int:
        """Return the tokens of the same turns as rows of their own."""
        return sum(branch.length for branch in self.branches)

    @property
    def num_terms(self) -> int:
        """Return T."""
        return sum(branch.turn.num_terms for branch in self.branches)


def lay_out(branches: Sequence[Branch]) -> PackedRow:
    """Write branches into one row.

    Args:
        branches: in depth-first order; the first one of a tree shares nothing.
    """
    if not branches:
        raise ValueError("a row needs at least one branch")
    num_tokens = sum(branch.length - branch.shared for branch in branches)
    token_ids = np.empty(num_tokens, dtype=np.int64)
    positions = np.empty(num_tokens, dtype=np.int64)
    subtree_ends = np.full(num_tokens, num_tokens, dtype=np.int64)
    # trail[d] = index in the row of the token at depth d on the path of the current branch.
    trail = np.empty(max(branch.length for branch in branches), dtype=np.int64)
    sources, offset, depth = [], 0, 0
    for branch in branches:
        length, shared, turn = branch.length, branch.shared, branch.turn
        subtree_ends[trail[shared:depth]] = offset
        end = offset + length - shared
        token_ids[offset:end] = turn.path[shared:]
        positions[offset:end] = np.arange(shared, length)
        trail[shared:length] = np.arange(offset, end)
        sources.append(trail[len(turn.prompt_ids) - 1 : length].copy())
        offset, depth = end, length
    turns = [branch.turn for branch in branches]
    return PackedRow(
        token_ids=token_ids,
        positions=positions,
        subtree_ends=subtree_ends,
        sources=np.concatenate(sources),
        targets=np.concatenate([turn.output_ids for turn in turns]).astype(np.int64),
        temperatures=np.concatenate(
            [np.full(turn.num_terms, turn.temperature, dtype=np.float32) for turn in turns]
        ),
    )


def _sorted_branches(turns: Sequence[TurnTokens]) -> list[Branch]:
    paths = [turn.path for turn in turns]
    # Big-endian bytes compare like the sequences of ids, with prefixes first.
    keys = [path.astype(">u4").tobytes() for path in paths]
    order = sorted(range(len(turns)), key=lambda index: (keys[index], turns[index].turn_id))
    shared = shared_lengths([paths[index] for index in order])
    return [Branch(turns[index], length) for index, length in zip(order, shared, strict=True)]


def _chains(turns: Sequence[TurnTokens]) -> list[Branch]:
    """Return branches that share only where one extends all of the one before it."""
    branches: list[Branch] = []
    for branch in _sorted_branches(turns):
        extends = bool(branches) and branch.shared == branches[-1].length
        branches.append(branch if extends else Branch(branch.turn, 0))
    return branches
