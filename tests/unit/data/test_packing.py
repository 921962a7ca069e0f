import itertools
from collections.abc import Sequence

import pytest
from harness.trees import make_turn, random_group
from support.dense_attention import visibility

from agentrl.data.batch import Bin, plan_bins
from agentrl.data.rows import Branch, TokenTree, lay_out
from agentrl.data.tokens import turn_tokens

TREES = [TokenTree.from_tokens(random_group(seed, num_turns=5).turns) for seed in range(4)]
BRANCHES = [branch for tree in TREES for branch in tree.branches]
TURNS = sorted(turn.turn_id for branch in BRANCHES for turn in branch.turns)
LONGEST = max(len(branch.path) for branch in BRANCHES)


@pytest.mark.parametrize("attention_cost", [0.0, 0.1])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 200])
@pytest.mark.parametrize("token_budget", [1, 40, 100, 10**6])
def test_every_turn_is_in_exactly_one_bin(
    token_budget: int, num_ranks: int, attention_cost: float
) -> None:
    shares = plan_bins(
        BRANCHES, token_budget=token_budget, num_ranks=num_ranks, attention_cost=attention_cost
    )
    assert len(shares) == num_ranks
    bins = [bin_ for share in shares for bin_ in share]
    assert sorted(t.turn_id for bin_ in bins for b in bin_.branches for t in b.turns) == TURNS
    for bin_ in bins:
        row = lay_out(bin_.branches)
        assert bin_.num_tokens == row.num_tokens
        assert bin_.num_pairs == visibility(row).sum()
        assert bin_.branches[0].shared == 0
        assert bin_.num_tokens <= token_budget * bin_.num_chunks


def test_a_tree_with_an_oversized_path_stays_whole_and_is_cut_in_chunks() -> None:
    (share,) = plan_bins(BRANCHES, token_budget=LONGEST - 1)
    chunked = [bin_ for bin_ in share if bin_.num_chunks > 1]
    assert chunked == list(share[: len(chunked)])
    assert 0 < len(chunked) < len(share)
    for bin_ in chunked:
        assert max(len(branch.path) for branch in bin_.branches) == LONGEST
        assert [branch.shared == 0 for branch in bin_.branches].count(True) == 1
    assert all(bin_.num_tokens <= LONGEST - 1 for bin_ in share[len(chunked) :])


def test_ranks_share_the_work_evenly() -> None:
    total = sum(tree.num_tokens for tree in TREES)
    for num_ranks in (2, 3, 4):
        shares = plan_bins(BRANCHES, token_budget=10**6, num_ranks=num_ranks)
        loads = [sum(bin_.num_tokens for bin_ in share) for share in shares]
        assert all(len(share) == 1 for share in shares)
        assert max(loads) <= 1.25 * total / num_ranks + LONGEST


def mixed_lengths() -> list[Branch]:
    """Two long conversations, and short ones with as many tokens in all."""
    lengths = [400, 400] + [20] * 40
    turns = [
        make_turn(f"t{number}/0", 0, [number % 7] * length, [1])
        for number, length in enumerate(lengths)
    ]
    return list(TokenTree.from_tokens(turn_tokens(turns), merge="none").branches)


def waited_for(shares: Sequence[Sequence[Bin]], attention_cost: float) -> float:
    """What the rounds take one after the other when every one lasts as long as its costliest."""
    return sum(
        max(bin_.cost(attention_cost) for bin_ in round_ if bin_)
        for round_ in itertools.zip_longest(*shares)
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("token_budget", [400, 800])
def test_rounds_are_alike_in_time_and_not_just_in_tokens(token_budget: int, num_ranks: int) -> None:
    attention_cost = 0.02
    planned, by_tokens = (
        plan_bins(
            mixed_lengths(), token_budget=token_budget, num_ranks=num_ranks, attention_cost=cost
        )
        for cost in (attention_cost, 0.0)
    )
    total = sum(bin_.cost(attention_cost) for share in planned for bin_ in share)
    longest = max(bin_.cost(attention_cost) for share in planned for bin_ in share)
    assert waited_for(planned, attention_cost) <= total / num_ranks + longest
    assert waited_for(planned, attention_cost) <= waited_for(by_tokens, attention_cost)


def test_a_long_path_is_alone_where_attention_is_what_takes_time() -> None:
    shares = plan_bins(mixed_lengths(), token_budget=10**6, num_ranks=3, attention_cost=0.1)
    assert sorted(len(bin_.branches) for share in shares for bin_ in share) == [1, 1, 40]
    by_tokens = plan_bins(mixed_lengths(), token_budget=10**6, num_ranks=3)
    assert sorted(len(bin_.branches) for share in by_tokens for bin_ in share) != [1, 1, 40]


def test_rows_of_many_passes_meet_in_the_same_rounds() -> None:
    shares = plan_bins(BRANCHES, token_budget=LONGEST // 2, num_ranks=3)
    rounds = [
        [bin_.num_chunks for bin_ in round_ if bin_] for round_ in itertools.zip_longest(*shares)
    ]
    assert max(rounds[0]) > 1
    for earlier, later in itertools.pairwise(rounds):
        assert min(earlier) >= max(later)


def test_no_rank_has_more_bins_than_the_budget_needs() -> None:
    single = plan_bins(BRANCHES, token_budget=100)[0]
    shares = plan_bins(BRANCHES, token_budget=100, num_ranks=2)
    assert max(len(share) for share in shares) == -(-len(single) // 2)
    assert all(bin_.num_tokens <= 100 for share in shares for bin_ in share)


def test_nothing_gives_nothing() -> None:
    assert plan_bins([], token_budget=10, num_ranks=2) == ((), ())
