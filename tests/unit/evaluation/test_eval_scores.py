import itertools

import numpy as np
import pytest

from agentrl.evaluation.eval_scores import (
    TaskScores,
    _t975,
    pass_at_k,
    rows_by_scorer,
    rows_by_tag,
    score_row,
)


@pytest.mark.parametrize(("tries", "right", "k"), [(4, 1, 2), (5, 2, 3), (6, 0, 1), (3, 3, 2)])
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_try(
    tries: int, right: int, k: int
) -> None:
    outcomes = [True] * right + [False] * (tries - right)
    draws = [any(draw) for draw in itertools.combinations(outcomes, k)]
    assert pass_at_k(tries, right, k) == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    rng = np.random.default_rng(0)
    right = rng.binomial(8, 0.3, size=20_000)
    estimate = np.mean([pass_at_k(8, int(count), 4) for count in right])
    assert estimate == pytest.approx(1 - 0.7**4, abs=0.01)


def test_more_draws_than_tries_are_refused() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 rollouts, got 2"):
        pass_at_k(2, 1, 3)


def test_a_row_means_over_questions_and_leaves_missing_scores_out() -> None:
    row = score_row(
        [TaskScores([1.0, 0.0, None]), TaskScores([0.0, 0.0, 0.0]), TaskScores([None, None, None])]
    )
    assert row is not None
    assert (row.num_tasks, row.num_tries, row.num_unscored) == (2, 5, 4)
    assert row.mean == pytest.approx(0.25)
    assert row.pass_at == {1: pytest.approx(0.25), 2: pytest.approx(0.5)}
    assert score_row([TaskScores([None])]) is None


@pytest.mark.parametrize(("num_questions", "num_tries"), [(3, 8), (5, 1), (5, 4), (60, 4)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(
    num_questions: int, num_tries: int
) -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        # Questions differ in difficulty; their tries are not independent of each other.
        difficulty = rng.beta(1.0, 2.0, size=num_questions)
        tries = [rng.binomial(1, p, size=num_tries).astype(float).tolist() for p in difficulty]
        row = score_row([TaskScores(scores) for scores in tries])
        assert row is not None
        assert row.low is not None
        assert row.high is not None
        held += row.low <= 1 / 3 <= row.high
    assert 0.92 < held / 400 <= 1.0


def test_quantiles_are_those_of_the_tables() -> None:
    tabled = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 29: 2.045, 999: 1.962}
    for degrees, value in tabled.items():
        assert _t975(degrees) == pytest.approx(value, rel=0.003)


def test_one_question_with_a_free_score_says_nothing_about_the_others() -> None:
    row = score_row([TaskScores([3.0, 5.0])])
    assert row is not None
    assert (row.mean, row.low, row.high, row.interval_text) == (4.0, None, None, "unknown")


def test_unanimous_questions_still_leave_doubt() -> None:
    row = score_row([TaskScores([1.0])] * 5)
    assert row is not None
    assert row.mean == 1.0
    assert row.low is not None
    assert 0.5 < row.low < 0.6
    assert row.high == 1.0


def test_scores_beyond_zero_and_one_get_an_interval_of_their_own() -> None:
    row = score_row([TaskScores([value]) for value in (-2.0, 0.0, 2.0, 4.0)])
    assert row is not None
    # The mean of 1, less and more of 3.182 times 1.291.
    assert row.low == pytest.approx(-3.108, abs=0.01)
    assert row.high == pytest.approx(5.108, abs=0.01)


def test_rows_by_scorer_and_by_tag() -> None:
    tasks = [
        TaskScores([1.0], "exact", ("easy", "price")),
        TaskScores([0.0], "math", ("easy",)),
        TaskScores([None], "gone", ("lost",)),
    ]
    assert {name: row.mean for name, row in rows_by_scorer(tasks).items()} == {
        "exact": 1.0,
        "math": 0.0,
    }
    assert {name: row.num_tasks for name, row in rows_by_tag(tasks).items()} == {
        "easy": 2,
        "price": 1,
    }
