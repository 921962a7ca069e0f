"""Credit in trees: the papers' formulas, written down again, and the exact policy gradient."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from harness.decisions import (
    Play,
    Rollout,
    chains,
    entropy_rule,
    enumerated,
    every_state,
    exact_gradient,
    played_tree,
    random_rule,
    surprising_turns,
    undecided_states,
    value_rule,
)

from agentrl.algorithms.advantages import group_turn_advantages
from agentrl.algorithms.tree_credit import QUESTION, TurnTree, grown_tree, tree_credits

EVERY_TREE_KIND = ("leave_one_out", "vine", "tree_grpo", "arpo")


def expected_gradient(play: Play, kind: str) -> np.ndarray:
    """Mean gradient of all groups that can be played, over the mean number of trees."""
    total, trees = np.zeros(6), 0.0
    for chance, group in enumerated(play):
        played = played_tree(group)
        total += chance * played.gradient(tree_credits(played.tree, kind))
        trees += chance * len(np.unique(played.tree.trees))
    return total / trees


UNBIASED: dict[str, Play] = {
    "chains": partial(chains, num_rollouts=3),
    "random": partial(random_rule, num_roots=2, num_branches=1),
    "every_state": partial(every_state, num_roots=2, num_branches=1),
    "undecided_states": partial(undecided_states, num_roots=2, entropy=0.62),
}


@pytest.mark.parametrize("rule", UNBIASED)
@pytest.mark.parametrize("kind", ["leave_one_out", "vine"])
def test_an_unbiased_estimate_has_the_gradient_as_its_mean(rule: str, kind: str) -> None:
    assert expected_gradient(UNBIASED[rule], kind) == pytest.approx(exact_gradient(), abs=1e-12)


@pytest.mark.parametrize(
    "play",
    [
        partial(entropy_rule, num_roots=2, num_branches=1),
        partial(value_rule, num_roots=2, num_branches=1),
        partial(surprising_turns, num_roots=2, surprise=0.7),
    ],
)
def test_rules_that_look_at_what_followed_bias_every_estimate(play: Play) -> None:
    for kind in EVERY_TREE_KIND:
        found = expected_gradient(play, kind)
        assert np.linalg.norm(found - exact_gradient()) > 0.02 * np.linalg.norm(exact_gradient())


def hand_tree(rewards: Sequence[float] = (0.0,) * 9) -> TurnTree:
    """Two trees: rollout 0 (turns 0 1 2), left by 1 (0 1 3) and 2 (0 4 5), 4 leaves 2; 3 is alone.

    Rollout 3 has turns 6 7, rollout 4 has turns 0 4 8.
    """
    return TurnTree(
        before=np.array([QUESTION, 0, 1, 1, 0, 4, QUESTION, 6, 4]),
        rewards=np.array(rewards),
        ends=np.array([2, 3, 5, 7, 8]),
        scores=np.array([1.0, 0.0, 0.5, 0.25, 0.75]),
        rounds=np.array([0, 0, 0, 1, 1, 1, 0, 0, 2]),
        by_branch=np.array([0, 0, 0, 1, 1, 1, 0, 0, 1], dtype=bool),
    )


SCORES = (1.0, 0.0, 0.5, 0.25, 0.75)
THROUGH = [(0, 1, 2, 4), (0, 1), (0,), (1,), (2, 4), (2,), (3,), (3,), (4,)]


def test_the_tree_of_a_group_counts_shared_turns_once() -> None:
    turns = grown_tree([None, 0, 0, None, 2], [0, 2, 1, 0, 2], [3, 3, 3, 2, 3])
    assert turns == [[0, 1, 2], [0, 1, 3], [0, 4, 5], [6, 7], [0, 4, 8]]


def test_a_parent_may_follow_its_branch() -> None:
    assert grown_tree([1, None], [1, 0], [2, 3]) == [[0, 3], [0, 1, 2]]


def test_weights_are_probabilities_under_chains() -> None:
    # State after turn 0: continued by 1 and by 4; after 1 by 2 and 3; after 4 by 5 and 8.
    assert hand_tree().weights.tolist() == [0.25, 0.25, 0.25, 1.0, 0.25]


def test_leave_one_out_by_hand() -> None:
    # State after turn 0: 1 (mean 0.5) and 4 (mean 0.625). The other tree, 0.25, enters each
    # baseline as one continuation.
    after_1, after_4 = (0.625 + 0.25) / 2, (0.5 + 0.25) / 2
    expected = [
        (0.5 + 0.625) / 2 - 0.25,
        0.5 * (0.5 - after_1),
        0.25 * (1.0 - (0.0 + after_1) / 2),
        0.25 * (0.0 - (1.0 + after_1) / 2),
        0.5 * (0.625 - after_4),
        0.25 * (0.5 - (0.75 + after_4) / 2),
        0.25 - 0.5625,
        0.25 - 0.5625,
        0.25 * (0.75 - (0.5 + after_4) / 2),
    ]
    assert tree_credits(hand_tree(), "leave_one_out") == pytest.approx(expected, abs=1e-12)


def test_trees_of_later_rounds_are_no_baseline_of_earlier_ones() -> None:
    later = hand_tree().rounds.copy()
    later[6:8] = 1
    tree = TurnTree(**{**vars(hand_tree()), "rounds": later})
    credits = tree_credits(tree, "leave_one_out")
    assert credits[0] == 0.0  # no other tree was begun with it
    assert credits[6] == pytest.approx(0.25 - 0.5625)


def test_a_branch_of_a_branch_has_the_baseline_of_its_own_round() -> None:
    # Turns 0 1 2 are of rounds 0, 1 and 2, since the parents have no score; tree 3 is of round 2.
    tree = TurnTree(
        before=np.array([QUESTION, 0, 1, QUESTION]),
        rewards=np.zeros(4),
        ends=np.array([2, 3]),
        scores=np.array([1.0, 0.0]),
        rounds=np.array([0, 1, 2, 2]),
        by_branch=np.array([False, True, True, False]),
    )
    assert tree_credits(tree, "leave_one_out").tolist() == [0.0, 0.0, 1.0, -1.0]


def test_vine_is_the_papers_difference_of_values() -> None:
    # V(question) = 0.25 (the other tree); V after 0 = the mean of rollouts 2 and 4 that left there;
    # V after 1 = rollout 1. Turn by turn: V(next) - V(now); the last one ends with the reward.
    expected = [0.625 - 0.25, 0.0 - 0.625, 1.0 - 0.0, 0.0, 0.0, 0.0, 0.25 - 0.5625, -0.3125, 0.0]
    assert tree_credits(hand_tree(), "vine") == pytest.approx(expected, abs=1e-12)


def test_vine_values_a_state_by_all_branches_if_its_rollout_has_no_score() -> None:
    tree = TurnTree(
        before=np.array([QUESTION, 0, 0, QUESTION]),
        rewards=np.zeros(4),
        ends=np.array([1, 2, 3]),
        scores=np.array([1.0, 0.0, 0.25]),
        rounds=np.array([0, 1, 1, 0]),
        by_branch=np.array([False, True, True, False]),
    )
    assert tree_credits(tree, "vine").tolist() == [0.5 - 0.25, 0.0, 0.0, 0.25 - 0.5]


def test_tree_grpo_is_the_gradient_of_the_papers_objective() -> None:
    trees = [(0, 1, 2, 4), (3,)]

    def normalized(rollout: int, among: Sequence[int]) -> float:
        values = [SCORES[member] for member in among]
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
        return (SCORES[rollout] - mean) / deviation if deviation else 0.0

    advantage = {
        rollout: normalized(rollout, tree) + normalized(rollout, range(5))
        for tree in trees
        for rollout in tree
    }
    # The objective adds up rollouts: a turn's log probability occurs once for each of them.
    expected = [sum(advantage[rollout] for rollout in rollouts) for rollouts in THROUGH]
    assert tree_credits(hand_tree(), "tree_grpo") == pytest.approx(expected, abs=1e-12)


def test_arpo_gives_shared_turns_the_mean() -> None:
    mean = sum(SCORES) / 5
    deviation = (sum((score - mean) ** 2 for score in SCORES) / 5) ** 0.5
    advantage = [(score - mean) / deviation for score in SCORES]
    expected = [sum(advantage[r] for r in rollouts) / len(rollouts) for rollouts in THROUGH]
    assert tree_credits(hand_tree(), "arpo") == pytest.approx(expected, abs=1e-12)
    assert (
        tree_credits(hand_tree(), "group_std").tolist()
        == tree_credits(hand_tree(), "arpo").tolist()
    )


@pytest.mark.parametrize("kind", ["leave_one_out", "group_std", "arpo"])
def test_a_reward_counts_for_its_turn_and_those_before_it(kind: str) -> None:
    plain = tree_credits(hand_tree(), kind)
    step = tree_credits(hand_tree((0, 0, 0, 0, 0, 0, 0, 0.5, 0)), kind)
    assert step[6] > plain[6]
    assert step[7] > plain[7]


@pytest.mark.parametrize("kind", ["leave_one_out", "group_mean", "group_std"])
def test_chains_get_what_they_get_without_a_tree(kind: str) -> None:
    played = [Rollout((0, 0, 1)), Rollout((1, 1)), Rollout((0, 1, 0)), Rollout((1, 0, 0))]
    tree = played_tree(tuple(played)).tree
    rewards = np.linspace(-0.3, 0.4, len(tree.rewards))
    tree = TurnTree(**{**vars(tree), "rewards": rewards})
    steps = [rewards[path].tolist() for path in tree.paths]
    by_rollout = group_turn_advantages(tree.scores.tolist(), steps, kind=kind)
    credits = tree_credits(tree, kind)
    for row, path in zip(by_rollout, tree.paths, strict=True):
        assert credits[path] == pytest.approx(row[: len(path)], abs=1e-12)


@pytest.mark.parametrize("kind", EVERY_TREE_KIND)
def test_equal_scores_give_no_credit(kind: str) -> None:
    tree = TurnTree(**{**vars(hand_tree()), "scores": np.full(5, 0.4)})
    assert tree_credits(tree, kind) == pytest.approx(np.zeros(9), abs=1e-12)
