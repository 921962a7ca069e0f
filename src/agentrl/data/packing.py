"""Packing of branches into bins, one row each, under a token budget, and their assignment to ranks.

A bin holds consecutive branches in depth-first order. Where a tree is cut, the next bin repeats the
shared prefix. Every target token is in exactly one bin, so the sum over bins is exact. A tree with a
path longer than the budget becomes one bin and is computed in chunks (`models.chunks`); cutting it
would repeat its long prefix.

The budget bounds memory, which grows with the number of tokens. Time also grows with the pairs that
attention visits, which dominate on long paths. Ranks wait for each other in every layer, so the bins
of one round should take the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.data.tree import Branch

_BISECTIONS = 20
"""Steps of the search for the cost limit. They find it to a precision of one millionth."""


@dataclass(frozen=True, eq=False)
class Bin:
    """The branches of one row; the first one carries its whole path."""

    branches: tuple[Branch, ...]
    num_tokens: int
    num_pairs: int
    """Visible (query, key) pairs."""
    num_chunks: int = 1
    """Passes needed to stay within the budget; more than 1 only for a long tree."""

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
        """Return the row's estimated time, in units of one token's cost outside attention."""
        return self.num_tokens + attention_cost * self.num_pairs


def plan_bins(
    branches: Sequence[Branch],
    *,
    token_budget: int,
    num_ranks: int = 1,
    attention_cost: float = 0.0,
    one_path_each: bool = False,
) -> tuple[tuple[Bin, ...], ...]:
    """Pack branches into bins and assign them to ranks.

    The number of rounds is the smallest that the budget allows. Within it, a bisection minimizes the
    cost of the most expensive bin, and bins of similar cost share a round.

    Args:
        branches: of all trees of the step, in depth-first order tree by tree.
        token_budget: tokens of one pass, repeated prefixes included.
        num_ranks: data-parallel ranks.
        attention_cost: cost of a visible pair in units of a token's cost outside attention.
        one_path_each: every branch becomes a separate bin of any length: for models whose layers do
            not support token trees.

    Returns:
        The bins of each rank: those in chunks first, then by falling cost. Ranks may differ by one
        bin; `build_step` pads with empty rows.
    """
    if one_path_each:
        bins_of_one = [Bin.of([branch.alone()]) for branch in branches]
        return _balance_across_ranks(bins_of_one, num_ranks, attention_cost)
    unchunked: list[Branch] = []
    chunked: list[Bin] = []
    for tree in _by_tree(branches):
        if max(len(branch.path) for branch in tree) <= token_budget:
            unchunked += tree
        else:
            num_tokens = sum(branch.num_new_tokens for branch in tree)
            chunked.append(Bin.of(tree, num_chunks=-(-num_tokens // token_budget)))
    bins = _fill_bins(unchunked, token_budget, attention_cost)
    if num_ranks > 1 and bins:
        num_rounds = -(-(len(bins) + len(chunked)) // num_ranks)
        max_bins = num_rounds * num_ranks - len(chunked)
        low, high = 0.0, max(bin_.cost(attention_cost) for bin_ in bins)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            smaller = _fill_bins(unchunked, token_budget, attention_cost, middle)
            if len(smaller) <= max_bins:
                bins, high = smaller, middle
            else:
                low = middle
    return _balance_across_ranks(chunked + bins, num_ranks, attention_cost)


def _by_tree(branches: Sequence[Branch]) -> list[list[Branch]]:
    trees: list[list[Branch]] = []
    for branch in branches:
        if branch.shared == 0:
            trees.append([])
        trees[-1].append(branch)
    return trees


def _fill_bins(
    branches: Sequence[Branch],
    token_budget: int,
    attention_cost: float,
    max_cost: float = float("inf"),
) -> list[Bin]:
    """Fill bins in order; start a new one if a branch would exceed the budget or the cost."""
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
    """Assign bins to ranks in rounds of falling cost.

    The direction alternates between rounds. No rank then always receives the most expensive bin
    of a round, so the totals are balanced as well.
    """
    shares: list[list[Bin]] = [[] for _ in range(num_ranks)]
    ordered = sorted(bins, key=lambda bin_: (-bin_.num_chunks, -bin_.cost(attention_cost)))
    for number, bin_ in enumerate(ordered):
        round_, position = divmod(number, num_ranks)
        shares[position if round_ % 2 == 0 else num_ranks - 1 - position].append(bin_)
    return tuple(tuple(share) for share in shares)
