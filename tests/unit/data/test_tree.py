import numpy as np
import pytest
from support.trees import make_turn, random_group

from agentrl.data import TokenTree
from agentrl.data.tokens import turn_tokens


def star():
    """Two records with a common prompt; the second repeats the first's reply and goes on."""
    return [
        make_turn("t/0", 0, [1, 2, 3], [4, 5]),
        make_turn("t/0", 1, [6], [7, 8], parent=0, shared_len=5),
        make_turn("t/1", 0, [1, 2, 3], [4, 9]),
    ]


def test_tree_by_hand():
    tree = TokenTree.from_turns(star())
    # Paths: 1 2 3 4 | 1 2 3 4 5 6 7 | 1 2 3 4 (the last sampled token of a turn is no input).
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tree.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert tree.subtree_ends.tolist() == [7] * 7
    terms = sorted(zip(tree.row.sources.tolist(), tree.row.targets.tolist(), strict=True))
    assert terms == [(2, 4), (2, 4), (3, 5), (3, 9), (5, 7), (6, 8)]
    assert (tree.num_tokens, tree.num_flat_tokens, tree.num_terms) == (7, 15, 6)


def test_branches_end_each_others_subtrees():
    tree = TokenTree.from_turns(
        [
            make_turn("t/0", 0, [1, 2], [3, 4, 0]),
            make_turn("t/1", 0, [1, 2], [3, 5, 0]),
            make_turn("t/2", 0, [6], [7, 0]),
        ]
    )
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tree.positions.tolist() == [0, 1, 2, 3, 3, 0, 1]
    assert tree.subtree_ends.tolist() == [5, 5, 5, 4, 5, 7, 7]


def test_linear_merge_only_extends_within_a_record():
    tree = TokenTree.from_tokens(turn_tokens(star()), merge="linear")
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    assert TokenTree.from_tokens(turn_tokens(star()), merge="none").num_tokens == 15


def test_same_token_sampled_and_read_is_one_term():
    tree = TokenTree.from_turns(
        [make_turn("t/0", 0, [1], [2, 3]), make_turn("t/1", 0, [1, 2], [3, 4])]
    )
    assert sorted(zip(tree.row.sources.tolist(), tree.row.targets.tolist(), strict=True)) == [
        (0, 2),
        (1, 3),
        (1, 3),
        (2, 4),
    ]


@pytest.mark.parametrize("merge", ["tree", "linear", "none"])
@pytest.mark.parametrize("seed", range(5))
def test_every_term_sees_its_own_prompt(seed, merge):
    group = random_group(seed, num_turns=6)
    tree = TokenTree.from_tokens(group.turns, merge=merge)
    index = np.arange(tree.num_tokens)
    term = 0
    for branch in tree.branches:
        full = np.concatenate([branch.turn.prompt_ids, branch.turn.output_ids])
        for offset, token in enumerate(branch.turn.output_ids.tolist()):
            source = tree.row.sources[term]
            path = (index <= source) & (source < tree.subtree_ends)
            context = full[: len(branch.turn.prompt_ids) + offset]
            assert tree.token_ids[path].tolist() == context.tolist()
            assert tree.positions[path].tolist() == list(range(len(context)))
            assert tree.row.targets[term] == token
            assert tree.row.temperatures[term] == np.float32(branch.turn.temperature)
            term += 1
    assert term == tree.num_terms


def test_a_tree_holds_every_distinct_prefix_once():
    group = random_group(9, num_turns=6)
    prefixes = {
        tuple(turn.path[: end + 1].tolist())
        for turn in group.turns
        for end in range(len(turn.path))
    }
    assert TokenTree.from_tokens(group.turns).num_tokens == len(prefixes)


def test_order_of_turns_does_not_change_the_tree():
    group = random_group(3)
    forward = TokenTree.from_tokens(group.turns)
    backward = TokenTree.from_tokens(group.turns[::-1])
    assert forward.token_ids.tolist() == backward.token_ids.tolist()
    assert [b.turn.turn_id for b in forward.branches] == [b.turn.turn_id for b in backward.branches]


def test_untrained_and_empty_turns_have_no_terms_but_carry_context():
    turns = [
        make_turn("t/0", 0, [1, 2], [3], trainable=False),
        make_turn("t/0", 1, [4], [], parent=0, shared_len=3),
        make_turn("t/0", 2, [5], [6], parent=1, shared_len=4),
    ]
    tokens = turn_tokens(turns)
    assert [turn.turn_id for turn in tokens] == ["t/0/1/2"]
    assert tokens[0].prompt_ids.tolist() == [1, 2, 3, 4, 5]


def test_greedy_turns_are_not_scaled():
    assert turn_tokens([make_turn("t/0", 0, [1], [2], temperature=0.0)])[0].temperature == 1.0


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([make_turn("t/0", 0, [], [1])], "has no prompt"),
        ([make_turn("t/0", 1, [1], [1])], "expected index 0"),
        ([make_turn("t/0", 0, [1], [1, 2], logprobs=[-1.0])], "2 tokens and 1 logprobs"),
    ],
)
def test_broken_turns_are_refused(turns, message):
    with pytest.raises(ValueError, match=message):
        turn_tokens(turns)
