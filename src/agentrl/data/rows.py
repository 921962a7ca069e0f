"""`PackedRow`: what one forward pass of a policy takes in.

A row is a forest of token trees in depth-first preorder, one after the other. Every token stands
once, however many turns run through it. Arrays only, no torch: rows are built by the `data` room
and may travel between processes.

Shape legend: N tokens of the row, T target tokens, W = layers * experts a token.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedRow:
    """Token trees in depth-first order and the (source, target) pairs that are asked for.

    Token k is visible to token q exactly when `k <= q < subtree_ends[k]`.
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
    """float32 [T], sampling temperature that divides the logits (1 where sampling was greedy)."""
    routed_experts: np.ndarray | None = None
    """int16 [N, W], experts that each token goes to, layer by layer, -1 where the model's own router
    says; None where it says so for all."""

    @property
    def num_tokens(self) -> int:
        """Return N."""
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """Return T."""
        return len(self.sources)


def empty_row() -> PackedRow:
    """Return a row of one token and no targets.

    A rank that ran out of work passes it through the model, so that all ranks take part in the
    same number of collective operations; it adds exactly nothing to the gradient.
    """
    none = np.empty(0, dtype=np.int64)
    return PackedRow(
        token_ids=np.zeros(1, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        subtree_ends=np.ones(1, dtype=np.int64),
        sources=none,
        targets=none,
        temperatures=np.empty(0, dtype=np.float32),
    )
