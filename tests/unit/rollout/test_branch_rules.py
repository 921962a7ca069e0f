"""What each rule chooses, in groups made by hand."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stored import make_turn

from agentrl.errors import UserCodeError
from agentrl.rollout.branch_rules import BranchingGroup, BranchPlace, choose_branch
from agentrl.schema import BranchPoint, Record, Score

GROUP = "train/0/q0"


def record(
    number: int,
    score: float | None = 1.0,
    *,
    at: int | None = None,
    of: int = 0,
    round_number: int = 0,
) -> Record:
    """An ended Record; without a score it failed."""
    point = None
    if at is not None:
        point = BranchPoint(record_id=f"{GROUP}/{of}", attempt=1, turn=at, rule="random")
        round_number = 1
    return Record(
        id=f"{GROUP}/{number}",
        task_id=GROUP,
        split="train",
        traj_id=number,
        order=0,
        round=round_number,
        branch=point,
        status="failed" if score is None else "scored",
        attempt=2,
        score=None if score is None else Score(scorer="exact", value=score),
    )


def group(pairs: Sequence[tuple[Record, int]], **fields: Any) -> BranchingGroup:
    """A group of Records with their numbers of turns."""
    values: dict[str, Any] = {
        "records": tuple(one for one, _ in pairs),
        "turns": {one.id: [make_turn(one, i) for i in range(n)] for one, n in pairs},
        "round": 1,
        "position": 0,
        "depth": 4,
        "seed": "0/q0/1/4",
        "round_seed": "0/q0/1",
    }
    return BranchingGroup(**{**values, **fields})


def chosen(rule: str, of: BranchingGroup) -> BranchPoint:
    point, why_none = choose_branch(rule, of)
    assert point is not None, why_none
    return point


def test_random_draws_roots_and_depths_evenly_and_whatever_they_led_to() -> None:
    # A rollout of one turn, of two, of five, and one that failed.
    records = [(record(0), 1), (record(1), 2), (record(2), 5), (record(3, None), 5)]
    drawn: Counter[tuple[str, int] | str] = Counter()
    for slot in range(4000):
        point, why_none = choose_branch("random", group(records, seed=f"7/q0/1/{slot}"))
        drawn["none" if point is None else (point.record_id, point.turn)] += 1
        assert bool(why_none) == (point is None)
    expected = [(f"{GROUP}/1", 1), *((f"{GROUP}/2", turn) for turn in range(1, 5))]
    assert set(drawn) == {"none", *expected}
    # Each of the 16 pairs of a root and a depth has the same probability.
    for place in expected:
        assert drawn[place] == pytest.approx(250, abs=60)


def test_random_leaves_roots_only() -> None:
    records = [(record(0), 1), (record(1, at=1), 5)]
    for slot in range(50):
        assert choose_branch("random", group(records, seed=str(slot)))[0] is None


@pytest.mark.parametrize("rule", ["random", "entropy", "value"])
def test_a_rule_chooses_the_same_place_again(rule: str) -> None:
    records = [(record(0, 0.0), 5), (record(1), 5)]
    assert chosen(rule, group(records)) == chosen(rule, group(records))
    # Both rollouts have the same turns, so that every rule has to choose between equals.
    seeds = [{"seed": str(n), "round_seed": str(n)} for n in range(40)]
    assert len({chosen(rule, group(records, **seed)).record_id for seed in seeds}) == 2


def test_entropy_prefers_the_turn_that_surprises_most_against_the_first() -> None:
    of = group([(record(0), 3), (record(1), 3)])
    surprises = {f"{GROUP}/0": (0.1, 0.2, 0.9), f"{GROUP}/1": (2.0, 2.5, 2.6)}
    for record_id, turns in of.turns.items():
        for turn, surprise in zip(turns, surprises[record_id], strict=True):
            # Later tokens do not count.
            values = np.full(40, -9.0, dtype=np.float32)
            values[:16] = -surprise
            turn.__dict__["output_logprobs"] = values
    ranked = [
        (f"{GROUP}/0", 2),
        *((f"{GROUP}/1", 2), (f"{GROUP}/1", 1), (f"{GROUP}/0", 1)),
    ]
    for position, expected in enumerate([*ranked, *ranked]):
        at = BranchingGroup(**{**of.__dict__, "position": position})
        point = chosen("entropy", at)
        assert (point.record_id, point.turn) == expected
        assert point.attempt == 2
    assert chosen("entropy", of).reason == "first tokens +0.800 nats against the first turn's"


def test_value_prefers_turns_whose_leaves_disagree_then_those_with_one_leaf() -> None:
    # From turn 2 of rollout 0 on, three leaves agree; at turn 1, a fourth disagrees.
    records = [
        (record(0, 1.0), 4),
        (record(1, 0.0), 3),
        (record(2, 0.0, at=1), 3),
        (record(3, 1.0, at=3), 4),
        (record(4, 1.0, at=2), 4),
    ]
    of = group(records, round=2)
    assert [one.traj_id for one in of.leaves_below(BranchPlace(f"{GROUP}/0", 1))] == [0, 2, 3, 4]
    assert [one.traj_id for one in of.leaves_below(BranchPlace(f"{GROUP}/0", 2))] == [0, 3, 4]
    assert [one.traj_id for one in of.leaves_below(BranchPlace(f"{GROUP}/0", 3))] == [0, 3]
    order = []
    for position in range(len(of.places())):
        point = chosen("value", BranchingGroup(**{**of.__dict__, "position": position}))
        order.append((int(point.record_id[-1]), point.turn))
    single = {(1, 1), (1, 2), (2, 2), (4, 3)}
    assert set(order[:4]) == single  # half the group's variance, 0.12
    assert order[4:] == [(0, 1), (0, 3), (0, 2)]
    pairs = [(record(0, 1.0), 3), (record(1, 0.0, at=1), 1), (record(2, 1.0), 2)]
    assert chosen("value", group(pairs, round=2)).record_id == f"{GROUP}/0"


def test_a_state_that_rollouts_share_is_one_place() -> None:
    of = group([(record(0), 4), (record(1, at=2), 4), (record(2, None), 4)])
    assert of.places() == [
        *(BranchPlace(f"{GROUP}/0", turn) for turn in (1, 2, 3)),
        BranchPlace(f"{GROUP}/1", 3),
    ]


@pytest.mark.parametrize("rule", ["random", "entropy", "value"])
def test_a_group_without_a_turn_to_leave_is_played_from_the_question(rule: str) -> None:
    point, why_none = choose_branch(rule, group([(record(0), 1), (record(1, None), 3)]))
    assert point is None
    assert why_none.startswith(f"{rule}: ")


OWN = """
def deepest(group):
    return max(group.places(), key=lambda place: place.turn)

def never(group):
    return None

def first_turn(group):
    return group.records[0].id, 0

def broken(group):
    return group.scores
"""


def test_a_users_rule_is_asked_and_its_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    file.write_text(OWN)
    of = group([(record(0), 2), (record(1), 3)])
    point = chosen(f"{file}:deepest", of)
    assert (point.record_id, point.turn, point.rule) == (f"{GROUP}/1", 2, f"{file}:deepest")
    assert choose_branch(f"{file}:never", of) == (None, f"{file}:never: it chose the question")
    with pytest.raises(UserCodeError, match=r"returned \('train/0/q0/0', 0\); return \(record id"):
        choose_branch(f"{file}:first_turn", of)
    with pytest.raises(UserCodeError, match=r"--branch_rule .*rules.py:12.*no attribute 'scores'"):
        choose_branch(f"{file}:broken", of)
