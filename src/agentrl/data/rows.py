"""`PackedRow`: the input of one forward pass of a policy.

A row is a sequence of token trees, each in depth-first preorder. A token that several turns share
appears once. Arrays only, no torch: rows are built on rank 0 and sent to other processes.

Shape legend: N tokens of the row, T target tokens, W = layers * experts per token.
"""

from dataclasses import dataclass

import numpy as np

from agentrl.data.shown_images import RowImages, ShownImage


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
