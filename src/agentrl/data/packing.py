"""Bins of branches under a token budget, the same number of bins on every rank.

A bin takes consecutive branches in depth-first order; where a tree is cut, the shared prefix is
laid down again in the next bin. Every loss term is in exactly one bin, so the sum over bins is
exact. A tree with a path longer than the budget stays whole in a bin of its own, which is then
computed in chunks (`models.chunks`): its prefix would otherwise be repeated at that length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.data.tree import Branch


@dataclass(frozen=True, eq=False)
class Bin:
    """Branches of one row, as cut: the first one shares nothing."""

    branches: tuple[Branch, ...]
    num_tokens: int
    num_chunks: int = 1
    """Passes that it takes to stay within the budget."""


def plan_bins(
    branches: Sequence[Branch], *, token_budget: int, num_ranks: int = 1
) -> tuple[tuple[Bin, ...], ...]:
    """Spread branches over ranks.

    Rounds are as few as the budget allows; within that many, the fullest bin is as small as
    possible, so that ranks wait little for each other.

    Args:
        branches: of all trees of the step, in depth-first order tree by tree.
        token_budget: tokens of one pass, repeated prefixes included.
        num_ranks: data-parallel ranks.

    Returns:
        The bins of each rank, those in chunks first; missing ones (fewer than on the first rank)
        mean an empty row.
    """
    within: list[Branch] = []
    chunked: list[Bin] = []
    for tree in _trees(branches):
        if max(len(branch.path) for branch in tree) <= token_budget:
            within += tree
        else:
            num_tokens = sum(branch.num_new_tokens for branch in tree)
            chunked.append(Bin(tuple(tree), num_tokens, -(-num_tokens // token_budget)))
    bins = _cut(within, token_budget)
    num_rounds = -(-(len(bins) + len(chunked)) // num_ranks)
    if num_ranks > 1 and bins:
        low, high = max(len(branch.path) for branch in within), max(b.num_tokens for b in bins)
        while low < high:
            middle = (low + high) // 2
            if len(_cut(within, middle)) + len(chunked) <= num_rounds * num_ranks:
                high = middle
            else:
                low = middle + 1
        bins = _cut(within, high)
    return _spread(chunked + bins, num_ranks, num_rounds)


def _trees(branches: Sequence[Branch]) -> list[list[Branch]]:
    trees: list[list[Branch]] = []
    for branch in branches:
        if branch.shared == 0:
            trees.append([])
        trees[-1].append(branch)
    return trees


def _cut(branches: Sequence[Branch], token_budget: int) -> list[Bin]:
    bins: list[Bin] = []
    current: list[Branch] = []
    used = 0
    for branch in branches:
        if current and used + branch.num_new_tokens > token_budget:
            bins.append(Bin(tuple(current), used))
            current, used = [], 0
        placed = branch if current else branch.alone()
        current.append(placed)
        used += placed.num_new_tokens
    if current:
        bins.append(Bin(tuple(current), used))
    return bins


def _spread(bins: list[Bin], num_ranks: int, num_rounds: int) -> tuple[tuple[Bin, ...], ...]:
    """Give every rank at most `num_rounds` bins, largest first to the least loaded rank."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(bins)), key=lambda i: (-bins[i].num_tokens, i)):
        open_ = [share for share in shares if len(share) < num_rounds]
        min(open_, key=lambda share: sum(bins[i].num_tokens for i in share)).append(index)
    return tuple(tuple(bins[index] for index in sorted(share)) for share in shares)
