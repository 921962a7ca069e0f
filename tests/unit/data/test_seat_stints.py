"""Every seat of a rollout is trained on what it earned, compared with the same seat of its group."""

from collections.abc import Sequence
from typing import Any

import pytest
from harness.trees import make_record, make_turn

from agentrl.config.sections import AlgorithmSection
from agentrl.data import select_group
from agentrl.data.select import SelectedGroup
from agentrl.schema import DBRecordData, Seat

TASK = "train/0/game"
WHITE, BLACK = "white", "black"


def played(
    traj_id: int,
    score: float | None,
    moves: Sequence[tuple[Seat | None, float | None]],
    *,
    keeps: bool = True,
) -> DBRecordData:
    """A record whose turn i was made by a seat, and earned its own step reward."""
    record_id = f"{TASK}/{traj_id}"
    turns = [
        make_turn(record_id, index, [index + 1], [4, 5], versions=[(3, 0, 2)]).model_copy(
            update={"seat": seat, "reward": reward}
        )
        for index, (seat, reward) in enumerate(moves)
    ]
    record = make_record(turns, score, traj_id=traj_id, task_id=TASK)
    if record.score is None:
        return record
    kept = record.score.model_copy(update={"seats_keep_rewards": keeps})
    return record.model_copy(update={"score": kept})


def seats(*rewards: tuple[str, float | None]) -> list[tuple[Seat, None]]:
    return [(Seat(name=name, reward=reward), None) for name, reward in rewards]


def select(records: Sequence[DBRecordData], **knobs: Any) -> SelectedGroup:
    return select_group(records, AlgorithmSection(adv_scaling=1.0, **knobs), policy_version=3)


def advantages(group: SelectedGroup) -> dict[tuple[int, int], float]:
    """Advantage by (record, turn)."""
    return {
        (int(turn.record_id[-1]), int(turn.turn_id.rsplit("/", 1)[1])): turn.advantage
        for turn in group.turns
    }


def test_a_return_to_go_does_not_flow_over_the_turns_of_others() -> None:
    won, lost = Seat(name=WHITE, reward=1.0), Seat(name=BLACK, reward=-1.0)
    first = played(0, 0.0, [(won, 0.5), (lost, None), (won, None), (lost, -0.25)])
    second = played(1, 0.0, seats((WHITE, -1.0), (BLACK, 1.0)))
    # G of white: 1.5, 1 and -1; of black: -1.25, -1.25 and 1.
    assert advantages(select([first, second])) == {
        (0, 0): 2.5,
        (0, 1): -2.25,
        (0, 2): 2.0,
        (0, 3): -2.25,
        (1, 0): -2.5,
        (1, 1): 2.25,
    }


def test_a_game_whose_mean_is_always_zero_still_trains_both_seats() -> None:
    """Signs are clipped by the seat's own reward: the mean counts as wrong for winners, too."""
    records = [
        played(0, 0.0, seats((WHITE, 1.0), (BLACK, -1.0))),
        played(1, 0.0, seats((WHITE, -1.0), (BLACK, 1.0))),
    ]
    group = select(records, sign_clip=True, min_score_spread=0.1)
    assert advantages(group) == {(0, 0): 2.0, (0, 1): -2.0, (1, 0): -2.0, (1, 1): 2.0}
    assert group.scores == (0.0, 0.0)


def test_a_group_is_dropped_if_no_seat_differs_from_itself() -> None:
    records = [played(n, 0.5, seats((WHITE, 1.0), (BLACK, 0.0))) for n in range(2)]
    assert set(select(records).dropped_records.values()) == {"zero_variance"}


def test_stints_of_one_seat_in_one_record_are_compared_with_all_of_them() -> None:
    """Best of two: G of the four stints is 1, 0, 0, 0."""
    records = [
        played(
            n,
            best / 2,
            [
                (Seat(name="solver", stint=0, reward=best), None),
                (Seat(name="solver", stint=1, reward=0.0), None),
            ],
        )
        for n, best in enumerate((1.0, 0.0))
    ]
    found = advantages(select(records))
    assert found == pytest.approx({(0, 0): 1.0, (0, 1): -1 / 3, (1, 0): -1 / 3, (1, 1): -1 / 3})


def test_a_scorers_value_reaches_the_turns_of_all_seats() -> None:
    records = [
        played(n, score, seats((WHITE, 9.0), (BLACK, -9.0)), keeps=False)
        for n, score in enumerate((1.0, 0.0))
    ]
    found = advantages(select(records))
    assert found == {(0, 0): 1.0, (0, 1): 1.0, (1, 0): -1.0, (1, 1): -1.0}


def test_a_rollout_that_hit_a_limit_counts_with_its_score_for_each_seat_that_called() -> None:
    records = [
        played(0, 1.0, seats((WHITE, 1.0), (BLACK, 1.0))),
        played(1, 0.0, seats((WHITE, None))),
    ]
    # Black made no call in the second: it has nothing to be compared with.
    assert advantages(select(records, drop_zero_advantage=False)) == {
        (0, 0): 1.0,
        (0, 1): 0.0,
        (1, 0): -1.0,
    }


def test_turns_of_an_untrained_seat_are_left_out_by_name_and_in_no_baseline() -> None:
    def talked(traj_id: int, reward: float) -> DBRecordData:
        user = Seat(name="user", trained=False)
        return played(traj_id, reward, [(user, None), (Seat(name="a", reward=reward), None)])

    group = select([talked(0, 1.0), talked(1, 0.0)])
    assert advantages(group) == {(0, 1): 1.0, (1, 1): -1.0}
    assert [turn.reason for turn in group.left_out] == ["untrained_seat"] * 2


def test_a_record_without_a_trained_seat_has_nothing_to_train_on() -> None:
    user = Seat(name="user", trained=False)
    group = select([played(0, 1.0, [(user, None)]), played(1, 0.0, seats(("a", 0.0)))])
    assert group.dropped_records[f"{TASK}/0"] == "no_targets"


def test_efficiency_shifts_every_seat_alike() -> None:
    records = [
        played(0, 0.75, seats((WHITE, 1.0), (BLACK, 0.5))),
        played(1, 0.75, seats((WHITE, 1.0), (BLACK, 0.5), (WHITE, 1.0))),
        played(2, 0.0, seats((WHITE, 0.0), (BLACK, 0.0))),
    ]
    found = advantages(select(records, efficient_rewarding=True, advantage_estimator="group_mean"))
    # The right records are shifted by 0.1 and -0.1: white has 1.1, 0.9 and 0.
    assert found[0, 0] == pytest.approx(1.1 - 2 / 3)
    assert found[1, 2] == pytest.approx(0.9 - 2 / 3)


def test_a_hundred_seats_are_a_hundred_baselines() -> None:
    names = [f"seat {n}.$" for n in range(100)]
    records = [
        played(traj_id, 0.0, seats(*((name, float(traj_id * n)) for n, name in enumerate(names))))
        for traj_id in range(2)
    ]
    found = advantages(select(records, drop_zero_advantage=False, sign_clip=False))
    assert [found[1, n] for n in range(100)] == [float(n) for n in range(100)]
