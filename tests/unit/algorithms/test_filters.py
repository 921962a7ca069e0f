from typing import Any

import numpy as np
import pytest

from agentrl.algorithms.filters import GroupFacts, RecordFacts, efficiency_shaped, filter_group


def group(*records: tuple[Any, ...], task_id: str = "train/0/q0") -> GroupFacts:
    """Records as (score, turns[, outcome])."""
    return GroupFacts(
        task_id,
        tuple(
            RecordFacts(f"{task_id}/{n}", record[0], record[1], (*record, "answered")[2])
            for n, record in enumerate(records)
        ),
    )


def test_equal_scores_teach_nothing() -> None:
    assert filter_group(group((1.0, 2), (0.95, 2), (None, 2))) == (
        "zero_variance",
        "zero_variance",
        "no_score",
    )
    assert filter_group(group((1.0, 2), (0.9, 2))) == (None, None)


def test_equal_scores_teach_where_single_turns_are_scored() -> None:
    records = (
        RecordFacts("a", 1.0, 1, "answered", has_step_scores=True),
        RecordFacts("b", 1.0, 1, "answered"),
        RecordFacts("c", None, 1, None, has_step_scores=True),
    )
    assert filter_group(GroupFacts("t", records)) == (None, None, "no_score")
    assert filter_group(GroupFacts("t", records[1:])) == ("zero_variance", "no_score")


def test_a_group_without_scores_is_left_out() -> None:
    assert filter_group(group((None, 1), (None, 1))) == ("no_score", "no_score")


def test_right_records_with_few_turns_are_left_out() -> None:
    facts = group((1.0, 1), (1.0, 2), (0.0, 1))
    assert filter_group(facts, min_turns=2) == ("few_turns", None, None)
    assert filter_group(facts, min_turns=1) == (None, None, None)


@pytest.mark.parametrize(("reserve", "kept"), [(-1, 3), (0, 0), (2, 2)])
def test_records_at_a_limit_are_rationed(reserve: int, kept: int) -> None:
    facts = group(
        (1.0, 2), (0.0, 2, "length_limit"), (0.0, 2, "turns_limit"), (0.0, 2, "turns_limit")
    )
    reasons = filter_group(facts, reserve_context_error_count=reserve)
    assert reasons[0] is None
    assert reasons[1:].count("context_limit") == 3 - kept


def test_balancing_keeps_one_more_wrong_and_two_more_right() -> None:
    facts = group(*[(1.0, 2)] * 6, *[(0.0, 2)] * 2, (None, 2))
    reasons = filter_group(facts, balance_sample=True)
    assert reasons[:6].count("balance") == 2
    assert reasons[6:] == (None, None, "no_score")
    facts = group((1.0, 2), *[(0.0, 2)] * 5)
    assert filter_group(facts, balance_sample=True).count("balance") == 3


def test_the_draw_depends_on_seed_and_task_alone() -> None:
    facts = group(*[(1.0, 2)] * 20, (0.0, 2))
    drawn = [filter_group(facts, balance_sample=True, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_efficient_records_gain_what_the_others_of_their_side_lose() -> None:
    facts = group((1.0, 2), (1.0, 4), (1.0, 6), (0.0, 1), (0.0, 3), (None, 3), (0.0, 3))
    shaped = efficiency_shaped(facts)
    assert shaped[:3] == pytest.approx((1.1, 1.0, 0.9))
    # Wrong side: 1 turn is worst, the tie shares its rank.
    assert shaped[3:5] == pytest.approx((-0.1, 0.05))
    assert shaped[5] is None
    assert shaped[6] == pytest.approx(0.05)
    assert np.sum([s for s in shaped if s is not None]) == pytest.approx(3.0)


def test_a_lone_record_keeps_its_score() -> None:
    assert efficiency_shaped(group((1.0, 9), (0.0, 1))) == (1.0, 0.0)
