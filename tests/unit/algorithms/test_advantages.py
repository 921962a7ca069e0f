import numpy as np
import pytest

from agentrl.algorithms import group_advantages
from agentrl.algorithms.advantages import (
    group_turn_advantages,
    returns_to_go,
    seat_turn_advantages,
    step_normalized,
    turn_advantages,
)
from agentrl.schema.formulas import AdvantageKind


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("leave_one_out", [2 / 3, -2 / 3, 2 / 3, -2 / 3]),
        ("group_mean", [0.5, -0.5, 0.5, -0.5]),
        ("group_std", [1.0, -1.0, 1.0, -1.0]),
    ],
)
def test_estimators_by_hand(kind: AdvantageKind, expected: list[float]) -> None:
    assert group_advantages([1.0, 0.0, 1.0, 0.0], kind=kind).tolist() == pytest.approx(expected)


def test_missing_scores_are_in_no_baseline() -> None:
    found = group_advantages([1.0, None, 0.0])
    assert np.isnan(found[1])
    assert found[[0, 2]].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("scores", [[1.0], [None, 0.3], []])
def test_without_a_second_score_there_is_no_advantage(scores: list[float | None]) -> None:
    assert not np.nan_to_num(group_advantages(scores)).any()


def test_equal_scores_have_no_spread_to_divide_by() -> None:
    assert group_advantages([0.3, 0.3], kind="group_std").tolist() == [0.0, 0.0]


def test_signs_are_clipped_against_right_and_wrong() -> None:
    scores = [0.6, 0.9, 1.0, 0.3]
    plain = group_advantages(scores, kind="group_mean", sign_clip=False)
    assert plain.tolist() == pytest.approx([-0.1, 0.2, 0.3, -0.4])
    assert group_advantages(scores, kind="group_mean").tolist() == pytest.approx(
        [0, 0.2, 0.3, -0.4]
    )
    assert group_advantages([0.4, 0.0], kind="group_mean").tolist() == pytest.approx([0.0, -0.2])


def test_scaling_comes_last() -> None:
    assert group_advantages([1.0, 0.0], adv_scaling=2.0).tolist() == [2.0, -2.0]


def test_overrides_only_lower_a_turn() -> None:
    found = turn_advantages([0.5] * 4, [None, 0.0, 2.0, -1.0], right=[True] * 4, adv_scaling=2.0)
    assert found.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert turn_advantages([-0.5] * 3, [None, 0.0, -1.0], right=[False] * 3).tolist() == [
        -0.5,
        -0.5,
        -1.0,
    ]
    assert turn_advantages([0.5], [-1.0], right=[True], sign_clip=False).tolist() == [-1.0]


def test_step_normalization_is_over_target_tokens() -> None:
    advantages, counts = np.array([1.0, -1.0, 0.5]), np.array([3, 1, 4])
    spread = np.repeat(advantages, counts)
    expected = (advantages - spread.mean()) / spread.std()
    assert step_normalized(advantages, counts) == pytest.approx(expected, rel=1e-7)
    assert step_normalized(np.full(2, 0.7), np.array([1, 2])).tolist() == [0.0, 0.0]
    assert step_normalized(np.empty(0), np.empty(0)).shape == (0,)


def test_returns_to_go_count_a_reward_up_to_the_turn_that_earned_it() -> None:
    found = returns_to_go([1.0, 0.0, None], [[0.5, None, -1.0], [0.25], []])
    assert found[0].tolist() == [0.5, 0.0, 0.0]
    assert found[1].tolist() == [0.25, 0.0, 0.0]
    assert np.isnan(found[2]).all()
    assert returns_to_go([], []).shape == (0, 0)


@pytest.mark.parametrize("kind", ["leave_one_out", "group_mean", "group_std"])
def test_a_bonus_that_all_turns_get_reinforces_none(kind: AdvantageKind) -> None:
    found = group_turn_advantages([1.0, 1.0, 1.0], [[0.1] * 4] * 3, kind=kind)
    assert found == pytest.approx(np.zeros((3, 4)), abs=1e-12)
    mixed = group_turn_advantages([1.0, 0.0, 0.0], [[0.1] * 4] * 3, kind=kind)
    alone = group_advantages([1.0, 0.0, 0.0], kind=kind, sign_clip=False)
    assert mixed == pytest.approx(np.repeat(alone[:, None], 4, axis=1))


@pytest.mark.parametrize("kind", ["leave_one_out", "group_mean", "group_std"])
def test_without_step_rewards_a_turn_has_the_advantage_of_its_record(kind: AdvantageKind) -> None:
    scores = [1.0, None, 0.0, 0.4]
    found = group_turn_advantages(scores, [[None] * n for n in (1, 0, 3, 2)], kind=kind)
    alone = group_advantages(scores, kind=kind, sign_clip=False)
    np.testing.assert_allclose(found, np.repeat(alone[:, None], 3, axis=1), atol=1e-15)


def test_turn_advantages_of_a_group_by_hand() -> None:
    """Two records of one question; the first earns 0.5 at its first turn and loses 1 at its last."""
    found = group_turn_advantages(
        [1.0, 0.0], [[0.5, None, -1.0], [None, None]], kind="leave_one_out"
    )
    # G of the first: 0.5, 0, 0; of the second: 0, 0, 0.
    assert found.tolist() == [[0.5, 0.0, 0.0], [-0.5, 0.0, 0.0]]


def test_runs_are_compared_with_their_own_seat_by_hand() -> None:
    """White wins the first record and loses the second; its first move there earns 0.5 besides."""
    found = seat_turn_advantages(
        ["white", "black", "white", "black"],
        [1.0, -1.0, -1.0, 1.0],
        [[0.5, None], [None, -0.25], [None], [None]],
        kind="leave_one_out",
    )
    # G of white: 1.5, 1 and -1 (also past its end); of black: -1.25, -1.25 and 1.
    assert [row.tolist() for row in found] == [[2.5, 2.0], [-2.25, -2.25], [-2.5], [2.25]]


@pytest.mark.parametrize("kind", ["leave_one_out", "group_mean", "group_std"])
def test_runs_of_one_seat_are_what_records_are(kind: AdvantageKind) -> None:
    scores = [1.0, None, 0.25]
    steps: list[list[float | None]] = [[0.5, None, -1.0], [None], [0.25, 0.25]]
    found = seat_turn_advantages(["player"] * 3, scores, steps, kind=kind)
    expected = group_turn_advantages(scores, steps, kind=kind)
    for row, values, rewards in zip(found, expected, steps, strict=True):
        np.testing.assert_array_equal(row, values[: len(rewards)])


def test_a_seat_that_no_other_record_has_has_no_baseline_and_no_advantage() -> None:
    found = seat_turn_advantages(["a", "b"], [1.0, 5.0], [[None], []])
    assert [row.tolist() for row in found] == [[0.0], []]
    assert seat_turn_advantages([], [], []) == []
