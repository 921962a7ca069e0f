"""Bins of branches under a token budget, the same number of bins on every rank.

A bin takes consecutive branches in depth-first order; where a tree is cut, the shared prefix is
laid down again in the next bin. Every target token is in exactly one bin, so the sum over bins is
exact. A tree with a path longer than the budget stays whole in a bin of its own, which is then
computed in chunks (`models.chunks`): its prefix would otherwise be repeated at that length.

The budget bounds memory, which goes with tokens. Time goes with tokens and, in long paths, with
the pairs that attention visits; ranks wait for each other in every layer of every round, so it is
time that has to be alike within a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.data.tree import Branch

_BISECTIONS = 20


@dataclass(frozen=True, eq=False)
class Bin:
    """Branches of one row, as cut: the first one shares nothing."""

    branches: tuple[Branch, ...]
    num_tokens: int
    num_pairs: int
    """(query, key) pairs that see each other."""
    num_chunks: int = 1
    """Passes that it takes to stay within the budget."""

    @classmethod
    def of(cls, branches: Sequence[Branch], num_chunks: int = 1) -> "Bin":
        """Return the bin of these branches."""
        return cls(
            tuple(branches),
            num_tokens=sum(branch.num_new_tokens for branch in branches),
            num_pairs=sum(branch.num_new_pairs for branch in branches),
            num_chunks=num_chunks,
        )

    def cost(self, attention_cost: float) -> float:
        """Return what the row takes, in units of a token's work outside attention."""
        return self.num_tokens + attention_cost * self.num_pairs


def plan_bins(
    branches: Sequence[Branch],
    *,
    token_budget: int,
    num_ranks: int = 1,
    attention_cost: float = 0.0,
) -> tuple[tuple[Bin, ...], ...]:
    """Spread branches over ranks.

    Rounds are as few as the budget allows; within that many, the costliest bin is as cheap as
    possible, and the bins of a round are alike.

    Args:
        branches: of all trees of the step, in depth-first order tree by tree.
        token_budget: tokens of one pass, repeated prefixes included.
        num_ranks: data-parallel ranks.
        attention_cost: work of a visible pair over that of a token outside attention.

    Returns:
        The bins of each rank by falling cost, those in chunks first; where a rank has fewer than
        another, empty rows take their place.
    """
    within: list[Branch] = []
    chunked: list[Bin] = []
    for tree in _trees(branches):
        if max(len(branch.path) for branch in tree) <= token_budget:
            within += tree
        else:
            num_tokens = sum(branch.num_new_tokens for branch in tree)
            chunked.append(Bin.of(tree, num_chunks=-(-num_tokens // token_budget)))
    bins = _cut(within, token_budget, attention_cost)
    if num_ranks > 1 and bins:
        num_rounds = -(-(len(bins) + len(chunked)) // num_ranks)
        room = num_rounds * num_ranks - len(chunked)
        low, high = 0.0, max(bin_.cost(attention_cost) for bin_ in bins)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if len(smaller := _cut(within, token_budget, attention_cost, middle)) <= room:
                bins, high = smaller, middle
            else:
                low = middle
    return _balance_across_ranks(chunked + bins, num_ranks, attention_cost)


def _trees(branches: Sequence[Branch]) -> list[list[Branch]]:
    trees: list[list[Branch]] = []
    for branch in branches:
        if branch.shared == 0:
            trees.append([])
        trees[-1].append(branch)
    return trees


def _cut(
    branches: Sequence[Branch],
    token_budget: int,
    attention_cost: float,
    max_cost: float = float("inf"),
) -> list[Bin]:
    """Cut where the next branch would go beyond the budget or the cost."""
    bins: list[list[Branch]] = []
    tokens, cost = 0, 0.0
    for branch in branches:
        new_tokens = branch.num_new_tokens
        new_cost = new_tokens + attention_cost * branch.num_new_pairs
        if not bins or tokens + new_tokens > token_budget or cost + new_cost > max_cost:
            bins.append([branch.alone()])
            tokens = len(branch.path)
            cost = tokens + attention_cost * bins[-1][0].num_new_pairs
        else:
            bins[-1].append(branch)
            tokens, cost = tokens + new_tokens, cost + new_cost
    return [Bin.of(bin_) for bin_ in bins]


def _balance_across_ranks(
    bins: list[Bin], num_ranks: int, attention_cost: float
) -> tuple[tuple[Bin, ...], ...]:
    """Deal bins round by round, costliest first, to and fro so that whole shares are alike too."""
    shares: list[list[Bin]] = [[] for _ in range(num_ranks)]
    ordered = sorted(bins, key=lambda bin_: (-bin_.num_chunks, -bin_.cost(attention_cost)))
    for number, bin_ in enumerate(ordered):
        round_, place = divmod(number, num_ranks)
        shares[place if round_ % 2 == 0 else num_ranks - 1 - place].append(bin_)
    return tuple(tuple(share) for share in shares)
