"""Groups that branch: a shared turn is trained once, with its own credit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.trees import make_record, make_turn

from agentrl.algorithms import group_advantages
from agentrl.config.sections import AlgorithmSection
from agentrl.data import build_step, select_group
from agentrl.data.record_tree import record_tree, turn_worths
from agentrl.data.select import SelectedGroup
from agentrl.schema import BranchPoint, DBRecordData, Seat
from agentrl.store.documents.codec import from_document, to_document

TASK = "train/0/q0"
ESTIMATORS = (
    "leave_one_out",
    "group_mean",
    "group_std",
    "reinforce_plus_plus",
    "tree_grpo",
    "vine",
    "arpo",
)


def played(
    traj_id: int,
    score: float | None,
    answers: Sequence[int],
    *,
    left: tuple[int, int] | None = None,
    versions: Sequence[int] | None = None,
    rewards: Sequence[float | None] | None = None,
    seats: Sequence[Seat] | None = None,
    round_number: int = 0,
) -> DBRecordData:
    """A record whose turn i sampled `answers[i]` twice; `left`: the record and turn it branched at."""
    record_id = f"{TASK}/{traj_id}"
    turns = []
    length = 0
    for index, answer in enumerate(answers):
        added = [1, 2] if index == 0 else [3]
        version = 3 if versions is None else versions[index]
        turn = make_turn(
            record_id,
            index,
            added,
            [answer, answer],
            parent=None if index == 0 else index - 1,
            shared_len=length,
            versions=[(version, 0, 2)],
        )
        turns.append(
            turn.model_copy(
                update={
                    "reward": None if rewards is None else rewards[index],
                    "seat": None if seats is None else seats[index],
                }
            )
        )
        length += len(added) + 2
    branch = None
    if left is not None:
        parent = f"{TASK}/{left[0]}"
        branch = BranchPoint(record_id=parent, attempt=1, turn=left[1], rule="random")
    record = make_record(turns, score, traj_id=traj_id, task_id=TASK)
    return record.model_copy(update={"branch": branch, "round": round_number})


def group_of_two_trees(**changes: Any) -> list[DBRecordData]:
    return [
        played(0, 1.0, (5, 6, 7)),
        played(1, 0.0, (8, 9)),
        played(2, 0.0, (5, 6, 10), left=(0, 2), round_number=1, **changes),
    ]


def select(records: Sequence[DBRecordData], **flags: Any) -> SelectedGroup:
    return select_group(records, AlgorithmSection(**flags), policy_version=3)


def credits(group: SelectedGroup) -> dict[tuple[int, int], float]:
    """Advantage by (record, turn)."""
    return {
        (int(turn.record_id[-1]), int(turn.turn_id.rsplit("/", 1)[1])): turn.advantage
        for turn in group.turns
    }


def test_a_shared_turn_is_trained_once_with_its_own_credit() -> None:
    group = select(group_of_two_trees())
    # Value of the shared turns: (1 + 0) / 2. Its baseline is the other tree, 0; that of the turns
    # after the branch also has the other continuation.
    assert credits(group) == pytest.approx(
        {
            (0, 0): 0.5,
            (0, 1): 0.5,
            (0, 2): 0.5 * (1.0 - 0.0),
            (1, 0): -0.5,
            (1, 1): -0.5,
            (2, 2): 0.5 * (0.0 - (1.0 + 0.0) / 2),
        }
    )
    assert [(turn.record_id[-1], turn.reason) for turn in group.left_out] == [
        ("2", "inherited"),
        ("2", "inherited"),
    ]
    assert group.dropped_records == {}


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_estimator_leaves_copies_to_the_record_that_sampled_them(kind: str) -> None:
    group = select(group_of_two_trees(), advantage_estimator=kind, drop_zero_advantage=False)
    assert sorted(credits(group)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("kind", ["leave_one_out", "group_mean", "group_std"])
def test_chains_have_the_credit_of_their_records_bit_for_bit(kind: str) -> None:
    scores = [0.1, 0.7, 0.2, 1.0 / 3.0]
    records = [played(number, score, (5, 6)) for number, score in enumerate(scores)]
    found = credits(select(records, advantage_estimator=kind, drop_zero_advantage=False))
    expected = group_advantages(scores, kind=kind).tolist()
    assert found == {(record, turn): expected[record] for record in range(4) for turn in range(2)}


def test_a_bad_turn_on_the_way_to_a_right_answer_keeps_its_sign() -> None:
    group = select(
        [
            played(0, 1.0, (5, 6, 7)),
            played(1, 1.0, (5, 6, 8), left=(0, 2)),
            played(2, 1.0, (5, 9, 8), left=(0, 1)),
            played(3, 0.0, (5, 6, 4), left=(0, 2)),
            played(4, 0.9, (11,)),
        ]
    )
    assert credits(group)[0, 1] < 0 < credits(group)[0, 2]


def test_a_branch_without_its_parent_trains_the_turns_it_copied() -> None:
    orphan = [played(1, 0.0, (8, 9)), played(2, 1.0, (5, 6, 10), left=(0, 2))]
    assert sorted(credits(select(orphan, drop_zero_advantage=False))) == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    again = [record.model_copy(update={"attempt": 2}) for record in group_of_two_trees()[:1]]
    assert record_tree([*again, *orphan]).num_inherited == (0, 0, 0)


def test_a_parent_without_a_score_still_shares_its_turns() -> None:
    records = [played(0, None, (5, 6, 7)), *group_of_two_trees()[1:], played(3, 1.0, (4,))]
    group = select(records)
    # Rollouts 1, 2 and 3 have scores 0, 0 and 1; the parent's own turns go with it.
    assert credits(group) == pytest.approx({(1, 0): -0.5, (1, 1): -0.5, (2, 2): -0.5, (3, 0): 1.0})
    assert group.dropped_records == {f"{TASK}/0": "no_score"}


def test_a_copy_does_not_make_a_branch_stale() -> None:
    records = [
        played(0, 1.0, (5, 6, 7), versions=(1, 1, 1)),
        played(1, 0.0, (8, 9)),
        played(2, 0.0, (5, 6, 10), left=(0, 2), versions=(1, 1, 3)),
    ]
    group = select(records, max_staleness=1)
    assert group.dropped_records == {f"{TASK}/0": "stale"}
    assert sorted(credits(group)) == [(1, 0), (1, 1), (2, 2)]


def test_a_branch_is_dropped_for_what_its_own_turns_lack() -> None:
    records = [*group_of_two_trees(), played(3, 0.5, (5, 12), left=(0, 1))]
    group = select(records, advantage_estimator="vine")
    assert group.dropped_records[f"{TASK}/3"] == "zero_advantage"


def test_leaves_of_equal_scores_teach_nothing() -> None:
    records = [played(0, 1.0, (5, 6)), played(1, 1.0, (5, 7), left=(0, 1)), played(2, 1.0, (4,))]
    group = select(records)
    assert not group.usable
    assert set(group.dropped_records.values()) == {"zero_variance"}


def test_rewards_of_turns_enter_the_tree_once() -> None:
    records = [
        played(0, 1.0, (5, 6, 7), rewards=(0.5, None, 0.25)),
        played(1, 0.0, (8, 9)),
        played(2, 0.0, (5, 6, 10), left=(0, 2), rewards=(0.5, None, None)),
    ]
    found = credits(select(records))
    assert found[0, 0] == pytest.approx(0.5 + (1.25 + 0.0) / 2)
    assert found[0, 1] == pytest.approx((1.25 + 0.0) / 2)
    assert found[0, 2] == pytest.approx(0.5 * (1.25 - 0.0))


def with_seats_kept(records: Sequence[DBRecordData]) -> list[DBRecordData]:
    return [
        record.model_copy(
            update={"score": record.score.model_copy(update={"seats_keep_rewards": True})}
        )
        for record in records
        if record.score is not None
    ]


def test_seats_are_compared_with_themselves() -> None:
    def game(white: float, black: float) -> list[Seat]:
        pair = Seat(name="white", reward=white), Seat(name="black", reward=black)
        return [pair[0], pair[1], pair[0], pair[1]]

    records = [
        played(0, 0.0, (5, 6, 7, 8), seats=game(1.0, -1.0)),
        played(1, 0.0, (4, 3, 2, 1), seats=game(-1.0, 1.0)),
        played(2, 0.0, (5, 6, 7, 9), left=(0, 3), seats=game(-1.0, 1.0)),
    ]
    found = credits(select(with_seats_kept(records), drop_zero_advantage=False))
    assert found[0, 0] == found[0, 2] == pytest.approx((1.0 - 1.0) / 2 + 1.0)
    assert found[0, 1] == pytest.approx((-1.0 + 1.0) / 2 - 1.0)
    assert found[0, 3] == pytest.approx(0.5 * (-1.0 - (1.0 + 1.0) / 2))
    assert (2, 0) not in found


def test_second_stints_are_compared_with_second_stints() -> None:
    records = [
        played(
            number,
            0.0,
            (5 + number, 7 + number),
            seats=[Seat(name="white", reward=r, stint=stint) for stint, r in enumerate(rewards)],
        )
        for number, rewards in enumerate([(1.0, 0.0), (0.0, 0.25)])
    ]
    found = credits(select(with_seats_kept(records), advantage_estimator="vine"))
    assert found == pytest.approx({(0, 0): 1.0, (0, 1): -0.25, (1, 0): -1.0, (1, 1): 0.25})


def test_a_function_of_the_user_gets_the_tree(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import numpy as np\n"
        "from agentrl.algorithms.tree_credit import TurnTree\n\n\n"
        "def first_turns(tree: TurnTree) -> np.ndarray:\n"
        "    return np.where(tree.depths == 0, tree.passes.sum(axis=0).astype(float), 0.0)\n"
    )
    group = select(group_of_two_trees(), advantage_estimator=f"{path}:first_turns")
    assert credits(group) == {(0, 0): 2.0, (1, 0): 1.0}


def test_a_shared_prefix_is_computed_once() -> None:
    group = select(group_of_two_trees())
    step = build_step([group], policy_version=3, token_budget=1000)
    # The question, copied turns with what followed them, and the first sampled token of each last
    # turn, since nothing is predicted from its second.
    assert step.stats.tokens_packed == 2 + 6 + 1 + 1 + 4
    assert step.stats.tokens_by_rollout == 9 + 6 + 9


def test_the_stored_form_keeps_what_credit_is_read_from() -> None:
    record = group_of_two_trees()[2].model_copy(update={"turns": ()})
    again = from_document(DBRecordData, to_document(record))
    assert (again.branch, again.round) == (record.branch, 1)


def test_the_worth_of_a_turn_is_the_score_that_chains_would_reach_through_it() -> None:
    records = [
        *group_of_two_trees(),
        # The state after record 0's first turn is left twice: its own continuation keeps a third.
        played(3, 0.0, (5, 11), left=(0, 1), round_number=1),
        played(4, 1.0, (5, 12), left=(0, 1), round_number=1),
        played(5, None, (5, 13), left=(0, 1), round_number=1),
    ]
    tree = record_tree(records)
    worths = turn_worths(tree, [record.score.value if record.score else None for record in records])

    def seen(record: int, turn: int) -> tuple[float, float, int, bool]:
        worth = worths[tree.turns[record][turn]]
        return worth.before, worth.after, worth.num_leaves, worth.is_decision

    assert seen(0, 0) == pytest.approx((0.25, 0.5, 4, True))
    assert seen(0, 1) == seen(2, 1) == pytest.approx((0.5, 0.5, 2, True))
    assert seen(0, 2) == pytest.approx((0.5, 1.0, 1, True))
    assert seen(2, 2) == pytest.approx((0.5, 0.0, 1, True))
    assert seen(3, 1) == pytest.approx((0.5, 0.0, 1, True))
    assert seen(1, 0) == pytest.approx((0.25, 0.0, 1, False))
    assert seen(1, 1) == pytest.approx((0.0, 0.0, 1, False))
    assert tree.turns[5][1] not in worths
    assert turn_worths(record_tree(records[5:]), [None]) == {}
