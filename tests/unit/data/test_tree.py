import subprocess
import sys

import numpy as np
import pytest
from harness.random_groups import MOVES, random_turns
from harness.trees import VOCABULARY, make_turn, random_group

from agentrl.data import TokenTree
from agentrl.data.rows import Merge
from agentrl.data.tokens import turn_tokens
from agentrl.schema import DispatchedSamplingTask, rebuild_prompts


def star() -> list[DispatchedSamplingTask]:
    """Two records with a common prompt; the second repeats the first's reply and goes on."""
    return [
        make_turn("t/0", 0, [1, 2, 3], [4, 5]),
        make_turn("t/0", 1, [6], [7, 8], parent=0, shared_len=5),
        make_turn("t/1", 0, [1, 2, 3], [4, 9]),
    ]


def test_tree_by_hand() -> None:
    tree = TokenTree.from_turns(star())
    # Paths: 1 2 3 4 | 1 2 3 4 5 6 7 | 1 2 3 4 (the last sampled token of a turn is no input).
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tree.positions.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert tree.subtree_ends.tolist() == [7] * 7
    targets = sorted(zip(tree.row.sources.tolist(), tree.row.targets.tolist(), strict=True))
    assert targets == [(2, 4), (2, 4), (3, 5), (3, 9), (5, 7), (6, 8)]
    assert (tree.num_tokens, tree.num_flat_tokens, tree.num_targets) == (7, 15, 6)


def test_branches_end_each_others_subtrees() -> None:
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


def test_linear_merge_only_extends_within_a_record() -> None:
    tree = TokenTree.from_tokens(turn_tokens(star()), merge="linear")
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7]
    assert TokenTree.from_tokens(turn_tokens(star()), merge="none").num_tokens == 15


def test_same_token_sampled_and_read_is_one_target() -> None:
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
def test_every_target_sees_its_own_prompt(seed: int, merge: Merge) -> None:
    group = random_group(seed, num_turns=6)
    tree = TokenTree.from_tokens(group.turns, merge=merge)
    index = np.arange(tree.num_tokens)
    target = 0
    for turn in (turn for branch in tree.branches for turn in branch.turns):
        for token in range(turn.num_targets):
            source = tree.row.sources[target]
            path = (index <= source) & (source < tree.subtree_ends)
            context = turn.full_ids[: turn.num_prompt_tokens + token]
            assert tree.token_ids[path].tolist() == context.tolist()
            assert tree.positions[path].tolist() == list(range(len(context)))
            assert tree.row.targets[target] == turn.output_ids[token]
            assert tree.row.temperatures[target] == np.float32(turn.temperature)
            target += 1
    assert target == tree.num_targets


def test_a_tree_holds_every_distinct_prefix_once() -> None:
    group = random_group(9, num_turns=6)
    prefixes = {
        tuple(turn.path[: end + 1].tolist())
        for turn in group.turns
        for end in range(len(turn.path))
    }
    assert TokenTree.from_tokens(group.turns).num_tokens == len(prefixes)


@pytest.mark.parametrize("merge", ["tree", "linear", "none"])
def test_a_turn_that_a_record_sampled_twice_counts_twice(merge: Merge) -> None:
    """A retry in a fresh context may sample the same tokens again: two turns, four targets."""
    turns = [make_turn("t/0", index, [1, 2], [3, 4]) for index in (0, 1)]
    tree = TokenTree.from_tokens(turn_tokens(turns), merge=merge)
    assert tree.num_targets == 4
    assert tree.row.targets.tolist() == [3, 4, 3, 4]
    assert tree.num_tokens == (3 if merge == "tree" else 6)


def test_order_of_turns_does_not_change_the_tree() -> None:
    group = random_group(3)
    forward = TokenTree.from_tokens(group.turns)
    backward = TokenTree.from_tokens(group.turns[::-1])
    assert forward.token_ids.tolist() == backward.token_ids.tolist()
    assert forward.row.targets.tolist() == backward.row.targets.tolist()


def test_untrained_and_empty_turns_have_no_targets_but_carry_context() -> None:
    turns = [
        make_turn("t/0", 0, [1, 2], [3], trainable=False),
        make_turn("t/0", 1, [4], [], parent=0, shared_len=3),
        make_turn("t/0", 2, [5], [6], parent=1, shared_len=4),
    ]
    tokens = turn_tokens(turns)
    assert [turn.turn_id for turn in tokens] == ["t/0/1/2"]
    assert tokens[0].prompt_ids.tolist() == [1, 2, 3, 4, 5]


def test_full_ids_are_those_that_the_engine_saw() -> None:
    rng = np.random.default_rng(6)
    moves = [(move, back) for move in MOVES for back in (1, 2)]
    turns = random_turns(rng, "train/0/q6/0", [1, 2, 3, 4], moves, VOCABULARY)
    for tokens, turn, prompt in zip(turn_tokens(turns), turns, rebuild_prompts(turns), strict=True):
        assert tokens.prompt_ids.tolist() == prompt.tolist()
        assert tokens.output_ids.tolist() == turn.output_ids.tolist()


def test_turns_of_a_chain_share_their_memory() -> None:
    turns = [make_turn("t/0", 0, [1, 2], [3])]
    for index in range(1, 50):
        shared = 3 + 2 * (index - 1)
        turns.append(make_turn("t/0", index, [4], [5], parent=index - 1, shared_len=shared))
    tokens = turn_tokens(turns)
    assert {turn.chain for turn in tokens} == {0}
    assert all(np.shares_memory(turn.full_ids, tokens[-1].full_ids) for turn in tokens)


def test_a_cut_end_of_turn_token_still_makes_a_chain() -> None:
    turns = [
        make_turn("t/0", 0, [1], [2, 9]),
        make_turn("t/0", 1, [3], [4], parent=0, shared_len=2),
    ]
    tree = TokenTree.from_turns(turns)
    assert tree.token_ids.tolist() == [1, 2, 3]
    assert tree.row.targets.tolist() == [2, 9, 4]
    assert len(tree.branches) == 1


def test_greedy_turns_are_not_scaled() -> None:
    assert turn_tokens([make_turn("t/0", 0, [1], [2], temperature=0.0)])[0].temperature == 1.0


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([make_turn("t/0", 0, [], [1])], "has no prompt"),
        ([make_turn("t/0", 1, [1], [1])], "expected index 0"),
        ([make_turn("t/0", 0, [1], [1], parent=0)], "does not precede it"),
        ([make_turn("t/0", 0, [1], [1], shared_len=1)], "shares 1 tokens of a parent that has 0"),
        ([make_turn("t/0", 0, [1], [1, 2], logprobs=[-1.0])], "2 tokens and 1 logprobs"),
    ],
)
def test_broken_turns_are_refused(turns: list[DispatchedSamplingTask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turn_tokens(turns)


def test_trees_and_batches_are_built_without_torch() -> None:
    program = """
import sys
for name in ("torch", "transformers", "accelerate"):
    sys.modules[name] = None
import agentrl.data, agentrl.algorithms.filters
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
