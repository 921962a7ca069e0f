"""`TokenTree`: the turns of a step as a prefix tree of token ids as sampled, and its `PackedRow`.

Turns that extend each other form one path. Paths are sorted lexicographically. The new tokens of a
path are those after its common prefix with the previous path, and writing the new tokens of all paths
in order *is* the depth-first preorder of the compressed trie. A row, the input of one forward pass,
is a sequence of such trees; a token that several turns share appears in it once.

Target tokens are a flat list alongside the tree, one per (turn, sampled token). Two turns that
sampled the same token after the same context share its node and have two targets; a token that one
turn sampled and another has in its prompt has one target. Masks, advantages and normalizers belong
to targets, never to nodes.

Image tokens have the same id for all images. Paths are therefore compared by a key that
distinguishes images.

The blocks of a row's attention matrix that hold a visible pair follow from the subtrees' intervals,
without an N x N mask. They drive FlexAttention's kernel and count its work. Arrays only, no torch:
rows are built on rank 0 and sent to other processes.

Shape legend: N tokens of the row, P tokens above it, T target tokens, W = layers * experts per token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from agentrl.data.shown_images import PlacedImage, RowImages, ShownImage, rotary_positions
from agentrl.data.tokens import TurnTokens, turn_tokens
from agentrl.schema import DispatchedSamplingTask, num_shared_ids

Merge = Literal["tree", "linear", "packed", "none"]
"""Which prefixes are shared: see `TokenTree.from_tokens`; `none` also keeps turns out of shared rows."""
BLOCK = 128
"""Queries, and keys, per block: FlexAttention's default."""


@dataclass(frozen=True)
class PackedRow:
    """Token trees in depth-first order, and the (source, target) pairs whose logprobs are computed.

    Token k is visible to token q exactly if `k <= q < subtree_ends[k]`: a token sees its ancestors
    and itself.
    """

    token_ids: np.ndarray
    """int64 [N]."""
    positions: np.ndarray
    """int64 [N], depth in the tree: the position that the token had when it was sampled."""
    subtree_ends: np.ndarray
    """int64 [N], index after the last descendant of a token."""
    sources: np.ndarray
    """int64 [T], index in the row of the token whose hidden state predicts the target."""
    targets: np.ndarray
    """int64 [T], token ids that were sampled."""
    temperatures: np.ndarray
    """float32 [T], sampling temperature that divides the logits (1 if sampling was greedy)."""
    routed_experts: np.ndarray | None = None
    """int16 [N, W], experts of each token, layer by layer; -1 if the model's own router chooses.
    None if it chooses for all tokens.
    """
    images: RowImages | None = None
    """None if the row shows no images."""
    rotary_positions: np.ndarray | None = None
    """int64 [3, N], time, row and column of each token on its path, if a row shows images to a
    model that counts them; None: all three are `positions`.
    """
    stand_in: ShownImage | None = None
    """Set if rows of other ranks show images: encoded, but not shown, if this row or a chunk of it
    shows none, because encoding takes part in the ranks' collective operations.
    """

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """T."""
        return len(self.sources)

    @property
    def is_single_path(self) -> bool:
        """Whether every token sees all tokens before it."""
        return bool((self.subtree_ends == self.num_tokens).all())


def empty_row() -> PackedRow:
    """Return a row of one token and no targets.

    A rank that has no more work passes it through the model, because all ranks must take part in
    the same number of collective operations. Without targets, its contribution to every gradient is
    exactly 0.
    """
    empty = np.empty(0, dtype=np.int64)
    return PackedRow(
        token_ids=np.zeros(1, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        subtree_ends=np.ones(1, dtype=np.int64),
        sources=empty,
        targets=empty,
        temperatures=np.empty(0, dtype=np.float32),
    )


@dataclass(frozen=True, eq=False)
class Branch:
    """A path through the tree, and the turns on it. Branches are kept in depth-first order."""

    turns: tuple[TurnTokens, ...]
    """At least one; of any two, one's path is a prefix of the other's."""
    path: np.ndarray
    """int32, the longest of the turns' paths."""
    shared: int
    """Leading tokens of the path that the previous branch has already written to the row."""
    key: np.ndarray
    """int32, the path with a negative number, one for each image of the tree, where an image is."""

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images of the path."""
        return self.turns[-1].images

    @property
    def num_new_tokens(self) -> int:
        """The number of tokens that this branch adds to the row."""
        return len(self.path) - self.shared

    @property
    def num_new_pairs(self) -> int:
        """The number of visible (query, key) pairs whose query is a new token."""
        length, shared = len(self.path), self.shared
        return (length * (length + 1) - shared * (shared + 1)) // 2

    def alone(self) -> "Branch":
        """Return the branch as the first one of a row."""
        return replace(self, shared=0)


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A forest in depth-first preorder: N tokens, T target tokens."""

    branches: tuple[Branch, ...]

    @classmethod
    def from_turns(cls, turns: Iterable[DispatchedSamplingTask]) -> "TokenTree":
        """Merge all turns (every record, every turn, edited contexts too).

        Args:
            turns: all turns of one attempt of each record, in any order.
        """
        return cls.from_tokens(turn_tokens(turns))

    @classmethod
    def from_tokens(cls, turns: Sequence[TurnTokens], *, merge: Merge = "tree") -> "TokenTree":
        """Merge turns that are already in token form.

        Args:
            turns: in any order; equal input sets give equal trees.
            merge: `tree` shares every common prefix; `linear` shares only between turns of a record
                that extend each other; `packed` and `none` make every turn a separate path.
        """
        if merge in ("packed", "none"):
            return cls(tuple(Branch((turn,), turn.path, 0, turn.path) for turn in turns))
        numbers = _image_numbers(turns)
        chains: dict[tuple[str, int], list[TurnTokens]] = {}
        for turn in turns:
            chains.setdefault((turn.record_id, turn.chain), []).append(turn)
        branches = [_chain_branch(chain, numbers) for chain in chains.values()]
        branches.sort(key=_depth_first_key)
        if merge == "tree":
            branches = _with_shared_lengths(branches)
        return cls(tuple(branches))

    @cached_property
    def row(self) -> PackedRow:
        """The tokens in depth-first preorder and the targets in branch order."""
        return lay_out(self.branches)

    @property
    def token_ids(self) -> np.ndarray:
        """The distinct tokens, int64 [N]."""
        return self.row.token_ids

    @property
    def positions(self) -> np.ndarray:
        """The depth of each token, int64 [N]."""
        return self.row.positions

    @property
    def subtree_ends(self) -> np.ndarray:
        """The index after each token's last descendant, int64 [N]."""
        return self.row.subtree_ends

    @property
    def num_tokens(self) -> int:
        """N without laying the tree out."""
        return sum(branch.num_new_tokens for branch in self.branches)

    @property
    def num_flat_tokens(self) -> int:
        """The number of tokens if every turn were a separate row."""
        return sum(len(turn.path) for branch in self.branches for turn in branch.turns)

    @property
    def num_targets(self) -> int:
        """T."""
        return sum(turn.num_targets for branch in self.branches for turn in branch.turns)


def lay_out(branches: Sequence[Branch]) -> PackedRow:
    """Write branches into one row.

    Args:
        branches: in depth-first order; the first branch of each tree has `shared` 0.

    Raises:
        ValueError: there is no branch.
    """
    if not branches:
        raise ValueError("a row needs at least one branch")
    num_tokens = sum(branch.num_new_tokens for branch in branches)
    token_ids = np.empty(num_tokens, dtype=np.int64)
    positions = np.empty(num_tokens, dtype=np.int64)
    subtree_ends = np.full(num_tokens, num_tokens, dtype=np.int64)
    # trail[d] = index in the row of the token at depth d on the path of the current branch.
    trail = np.empty(max(len(branch.path) for branch in branches), dtype=np.int64)
    sources, offset, depth = [], 0, 0
    for branch in branches:
        length, shared = len(branch.path), branch.shared
        # The subtrees of the previous branch's tokens below `shared` end here.
        subtree_ends[trail[shared:depth]] = offset
        end = offset + length - shared
        token_ids[offset:end] = branch.path[shared:]
        positions[offset:end] = np.arange(shared, length)
        trail[shared:length] = np.arange(offset, end)
        # Each sampled token is predicted from the token before it, the first one from the last
        # token of the prompt.
        sources += [
            trail[turn.num_prompt_tokens - 1 : len(turn.path)].copy() for turn in branch.turns
        ]
        offset, depth = end, length
    turns = [turn for branch in branches for turn in branch.turns]
    images, rotary = _row_images(branches)
    experts = [branch.turns[-1].routed_experts for branch in branches]
    return PackedRow(
        token_ids=token_ids,
        positions=positions,
        subtree_ends=subtree_ends,
        sources=np.concatenate(sources),
        targets=np.concatenate([turn.output_ids for turn in turns]).astype(np.int64),
        temperatures=np.concatenate(
            [np.full(turn.num_targets, turn.temperature, dtype=np.float32) for turn in turns]
        ),
        routed_experts=_row_experts(experts, branches),
        images=images,
        rotary_positions=rotary,
    )


def _row_images(
    branches: Sequence[Branch],
) -> tuple[RowImages | None, np.ndarray | None]:
    """Return the images of a row, and its rotary positions if the model counts rows and columns."""
    placed: list[tuple[int, ShownImage]] = []
    offset = 0
    for branch in branches:
        own = [image for image in branch.images if branch.shared <= image.start < len(branch.path)]
        placed += [
            (offset + placed_image.start - branch.shared, placed_image.image)
            for placed_image in own
        ]
        offset += branch.num_new_tokens
    images = RowImages.of(placed)
    if images is None or images.images[0].grid is None:
        return images, None
    positions = [
        rotary_positions(len(branch.path), branch.images)[:, branch.shared :] for branch in branches
    ]
    return images, np.concatenate(positions, axis=1)


def _row_experts(
    experts: Sequence[np.ndarray | None], branches: Sequence[Branch]
) -> np.ndarray | None:
    known = [
        choices[branch.shared :]
        for choices, branch in zip(experts, branches, strict=True)
        if choices is not None
    ]
    return np.concatenate(known) if len(known) == len(experts) else None


def _image_numbers(turns: Iterable[TurnTokens]) -> dict[str, int]:
    """Return a negative number for every image, the same for equal sets of turns."""
    keys = {placed.image.key for turn in turns for placed in turn.images}
    return {key: -1 - number for number, key in enumerate(sorted(keys))}


def _chain_branch(turns: list[TurnTokens], numbers: Mapping[str, int]) -> Branch:
    ordered = sorted(turns, key=lambda turn: (len(turn.path), turn.turn_id))
    path = key = ordered[-1].path
    if ordered[-1].images:
        key = path.copy()
        for placed in ordered[-1].images:
            key[placed.start : placed.end] = numbers[placed.image.key]
    return Branch(tuple(ordered), path, 0, key)


def _depth_first_key(branch: Branch) -> tuple[bytes, str]:
    # Big-endian bytes compare like sequences of ids; prefixes come first.
    return branch.key.astype(">u4").tobytes(), branch.turns[0].turn_id


def _with_shared_lengths(branches: list[Branch]) -> list[Branch]:
    merged = branches[:1]
    for before, branch in pairwise(branches):
        merged.append(replace(branch, shared=num_shared_ids(before.key, branch.key)))
    return merged


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
