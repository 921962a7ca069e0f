import pytest
from support.trees import random_group

from agentrl.data.packing import plan_bins
from agentrl.data.tree import TokenTree

TREES = [TokenTree.from_tokens(random_group(seed, num_turns=5).turns) for seed in range(4)]
BRANCHES = [branch for tree in TREES for branch in tree.branches]
TURNS = sorted(turn.turn_id for branch in BRANCHES for turn in branch.turns)
LONGEST = max(len(branch.path) for branch in BRANCHES)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 200])
@pytest.mark.parametrize("token_budget", [1, 40, 100, 10**6])
def test_every_turn_is_in_exactly_one_bin(token_budget, num_ranks):
    shares = plan_bins(BRANCHES, token_budget=token_budget, num_ranks=num_ranks)
    assert len(shares) == num_ranks
    bins = [bin_ for share in shares for bin_ in share]
    assert sorted(t.turn_id for bin_ in bins for b in bin_.branches for t in b.turns) == TURNS
    for bin_ in bins:
        assert bin_.num_tokens == sum(b.num_new_tokens for b in bin_.branches)
        assert bin_.branches[0].shared == 0
        assert bin_.num_tokens <= token_budget * bin_.num_chunks


def test_a_tree_with_an_oversized_path_stays_whole_and_is_cut_in_chunks():
    (share,) = plan_bins(BRANCHES, token_budget=LONGEST - 1)
    chunked = [bin_ for bin_ in share if bin_.num_chunks > 1]
    assert chunked == list(share[: len(chunked)])
    assert 0 < len(chunked) < len(share)
    for bin_ in chunked:
        assert max(len(branch.path) for branch in bin_.branches) == LONGEST
        assert [branch.shared == 0 for branch in bin_.branches].count(True) == 1
    assert all(bin_.num_tokens <= LONGEST - 1 for bin_ in share[len(chunked) :])


def test_ranks_share_the_work_evenly():
    total = sum(tree.num_tokens for tree in TREES)
    for num_ranks in (2, 3, 4):
        shares = plan_bins(BRANCHES, token_budget=10**6, num_ranks=num_ranks)
        loads = [sum(bin_.num_tokens for bin_ in share) for share in shares]
        assert all(len(share) == 1 for share in shares)
        assert max(loads) <= 1.25 * total / num_ranks + LONGEST


def test_no_rank_has_more_bins_than_the_budget_needs():
    single = plan_bins(BRANCHES, token_budget=100)[0]
    shares = plan_bins(BRANCHES, token_budget=100, num_ranks=2)
    assert max(len(share) for share in shares) == -(-len(single) // 2)
    assert all(bin_.num_tokens <= 100 for share in shares for bin_ in share)


def test_nothing_gives_nothing():
    assert plan_bins([], token_budget=10, num_ranks=2) == ((), ())
