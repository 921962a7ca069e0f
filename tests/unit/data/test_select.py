from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from harness.trees import make_record, make_turn

from agentrl.config.sections import AlgorithmSection
from agentrl.data import select_group
from agentrl.data.select import SelectedGroup
from agentrl.data.shown_images import ImageBook, ShownImage, processor_key
from agentrl.schema import DBRecordData, DispatchedSamplingTask

TASK = "train/0/q0"


def record(
    traj_id: int,
    score: float | None,
    *,
    versions: Sequence[int] = (3,),
    overrides: Sequence[float | None] | None = None,
    outcome: str | None = "answered",
    task_id: str = TASK,
) -> DBRecordData:
    """A record whose turn i sampled two tokens at `versions[i]`."""
    record_id = f"{task_id}/{traj_id}"
    turns: list[DispatchedSamplingTask] = []
    length = 0
    for index, version in enumerate(versions):
        turns.append(
            make_turn(
                record_id,
                index,
                [1, 2] if index == 0 else [3],
                [4, 5],
                parent=None if index == 0 else index - 1,
                shared_len=length,
                versions=[(version, 0, 2)],
                advantage=None if overrides is None else overrides[index],
            )
        )
        length += (2 if index == 0 else 1) + 2
    return make_record(turns, score, traj_id=traj_id, task_id=task_id, outcome=outcome)


def select(
    records: Sequence[DBRecordData],
    policy_version: int = 3,
    images: ImageBook | None = None,
    **knobs: Any,
) -> SelectedGroup:
    algorithm = AlgorithmSection(**knobs)
    return select_group(records, algorithm, policy_version=policy_version, images=images)


def advantages(group: SelectedGroup) -> dict[str, float]:
    return {turn.turn_id: turn.advantage for turn in group.turns}


def test_leave_one_out_advantages_reach_every_turn() -> None:
    group = select([record(0, 1.0, versions=(3, 3)), record(1, 0.0)], adv_scaling=2.0)
    assert advantages(group) == {
        f"{TASK}/0/1/0": 2.0,
        f"{TASK}/0/1/1": 2.0,
        f"{TASK}/1/1/0": -2.0,
    }
    assert group.usable
    assert group.dropped_records == {}
    assert group.scores == (1.0, 0.0)


def test_records_that_failed_are_dropped_and_in_no_baseline() -> None:
    group = select([record(0, 1.0), record(1, None), record(2, 0.0)])
    assert group.dropped_records == {f"{TASK}/1": "no_score"}
    assert sorted(advantages(group).values()) == [-1.0, 1.0]
    assert [(turn.reason, turn.num_targets) for turn in group.left_out] == [("no_score", 2)]


def test_a_group_of_equal_scores_is_not_usable() -> None:
    group = select([record(0, 1.0), record(1, 1.0)])
    assert not group.usable
    assert set(group.dropped_records.values()) == {"zero_variance"}
    assert group.scores == (1.0, 1.0)


def test_a_record_is_as_old_as_its_oldest_turn() -> None:
    resumed = record(0, 1.0, versions=(1, 2, 3))  # its first turn was sampled before a crash
    group = select([resumed, record(1, 0.0, versions=(2,)), record(2, 0.0, versions=(1,))])
    assert list(advantages(group)) == [f"{TASK}/1/1/0"]
    assert group.dropped_records == {f"{TASK}/0": "stale", f"{TASK}/2": "stale"}
    assert [(turn.reason, turn.num_targets) for turn in group.left_out] == [("stale", 2)] * 4


def test_a_stale_score_still_counts_in_the_baseline() -> None:
    fresh = select([record(0, 1.0), record(1, 0.0), record(2, 0.0)])
    aged = select([record(0, 1.0), record(1, 0.0), record(2, 0.0, versions=(0,))])
    assert advantages(aged)[f"{TASK}/0/1/0"] == advantages(fresh)[f"{TASK}/0/1/0"] == 1.0


@pytest.mark.parametrize("versions", [(1, 3), (3, 1)])
def test_the_oldest_token_of_a_turn_decides(versions: tuple[int, int]) -> None:
    spans = [(version, n, n + 1) for n, version in enumerate(versions)]
    mixed = make_turn(f"{TASK}/0", 0, [1], [2, 3], versions=spans)
    records = [make_record([mixed], 1.0), record(1, 0.0)]
    assert select(records, max_staleness=1).dropped_records == {f"{TASK}/0": "stale"}
    assert select(records, max_staleness=2).dropped_records == {}


def test_format_errors_lose_their_advantage() -> None:
    group = select([record(0, 1.0, versions=(3, 3), overrides=(0.0, None)), record(1, 0.0)])
    assert list(advantages(group)) == [f"{TASK}/0/1/1", f"{TASK}/1/1/0"]
    assert [turn.reason for turn in group.left_out] == ["zero_advantage"]
    kept = select(
        [record(0, 1.0, versions=(3, 3), overrides=(0.0, None)), record(1, 0.0)],
        drop_zero_advantage=False,
    )
    assert advantages(kept)[f"{TASK}/0/1/0"] == 0.0


def with_steps(data: DBRecordData, *rewards: float | None, **facts: Any) -> DBRecordData:
    assert data.score is not None
    score = data.score.model_copy(update={"step_scores": rewards, **facts})
    return data.model_copy(update={"score": score})


def test_a_turn_is_trained_on_what_its_record_earned_from_it_on() -> None:
    stepped = record(0, 1.0, versions=(3, 3, 3, 3), overrides=[None, None, 0.0, None])
    stepped = with_steps(stepped, -1.5, None, -0.75)
    knobs: dict[str, Any] = {"adv_scaling": 2.0, "drop_zero_advantage": False, "sign_clip": True}
    group = select([stepped, record(1, 0.0)], **knobs)
    # 1 - 2.25, 1 - 0.75, the override, 1; a bad step stays one in a right record.
    assert advantages(group) == pytest.approx(
        {
            f"{TASK}/0/1/0": -2.5,
            f"{TASK}/0/1/1": 0.5,
            f"{TASK}/0/1/2": 0.0,
            f"{TASK}/0/1/3": 2.0,
            f"{TASK}/1/1/0": 0.0,  # better from here on, but wrong
        }
    )


def test_a_bonus_for_every_turn_of_every_record_trains_nothing() -> None:
    records = [with_steps(record(n, 1.0, versions=(3, 3)), 0.1, 0.1) for n in range(3)]
    group = select(records)
    assert not group.usable
    assert {turn.reason for turn in group.left_out} == {"zero_advantage"}
    # The user is told that nothing can be learned from this group, not that records failed.
    assert {*group.dropped_records.values()} == {"zero_variance"}
    unscored = select([*records, record(3, None)])
    assert unscored.dropped_records[f"{TASK}/3"] == "no_score"
    assert unscored.dropped_records[f"{TASK}/0"] == "zero_variance"


def test_different_scores_without_advantages_are_not_called_equal() -> None:
    # The better record has a format error; the other one is right, so its sign is clipped.
    group = select([record(0, 1.0, overrides=(0.0,)), record(1, 0.8)])
    assert not group.usable
    assert {*group.dropped_records.values()} == {"zero_advantage"}


def test_a_value_that_includes_the_steps_is_not_counted_twice() -> None:
    whole = with_steps(record(0, 1.5, versions=(3, 3)), 0.5, None, value_includes_steps=True)
    added = with_steps(record(0, 1.0, versions=(3, 3)), 0.5, None)
    assert advantages(select([whole, record(1, 0.0)])) == advantages(
        select([added, record(1, 0.0)])
    )


def test_what_a_turn_earned_in_its_rollout_counts_where_the_scorer_says_nothing_of_it() -> None:
    def earning(data: DBRecordData, *rewards: float | None) -> DBRecordData:
        turns = [
            turn.model_copy(update={"reward": reward})
            for turn, reward in zip(data.turns, rewards, strict=True)
        ]
        return data.model_copy(update={"turns": tuple(turns)})

    plain, other = record(0, 1.0, versions=(3, 3)), record(1, 0.0)
    scored = with_steps(plain, 0.5, -0.25)
    assert advantages(select([earning(plain, 0.5, -0.25), other])) == advantages(
        select([scored, other])
    )
    assert advantages(select([earning(scored, 9.0, 9.0), other])) == advantages(
        select([scored, other])
    )


def odd(**facts: Any) -> SelectedGroup:
    """A group whose first record has one turn with these facts."""
    return select(
        [make_record([make_turn(f"{TASK}/0", 0, [1], [2, 3], **facts)], 1.0), record(1, 0.0)]
    )


def test_a_turn_that_is_given_in_part_is_not_trained() -> None:
    group = odd(logprobs=[-1.0, float("nan")], versions=[(3, 0, 2)])
    assert group.dropped_records == {f"{TASK}/0": "no_logprobs"}


@pytest.mark.parametrize("spans", [[], [(3, 0, 1)], [(3, 1, 2)]])
def test_a_token_of_no_known_version_is_not_taken_for_version_zero(
    spans: list[tuple[int, int, int]],
) -> None:
    group = odd(versions=spans)
    assert group.dropped_records == {f"{TASK}/0": "no_version"}
    assert [(turn.reason, turn.num_targets) for turn in group.left_out] == [("no_version", 2)]
    turns = [
        make_turn(f"{TASK}/0", 0, [1], [2, 3], versions=spans),
        make_turn(f"{TASK}/0", 1, [4], [5], versions=[(3, 0, 1)]),
    ]
    group = select([make_record(turns, 1.0), record(1, 0.0)], max_staleness=1)
    assert [turn.reason for turn in group.left_out] == ["no_version"]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_turn_sampled_with_penalties_is_left_out_by_name(name: str) -> None:
    penalized = record(0, 1.0)
    (turn,) = penalized.turns
    sampling = turn.sampling_params.model_copy(update={name: 1.3})
    turn = turn.model_copy(update={"sampling_params": sampling})
    group = select([penalized.model_copy(update={"turns": (turn,)}), record(1, 0.0)])
    assert group.dropped_records == {f"{TASK}/0": "penalties"}


def test_a_minimal_advantage_of_zero_is_honored() -> None:
    records = [record(0, 1.0), record(1, 0.0)]
    group = select(records, minimal_advantage=0.0)
    assert group.dropped_records == {f"{TASK}/1": "minimal_advantage"}
    group = select(records, skip_non_positive_advantage=True)
    assert group.dropped_records == {f"{TASK}/1": "non_positive_advantage"}


def test_efficiency_reaches_the_advantages() -> None:
    records = [record(0, 1.0), record(1, 1.0, versions=(3, 3)), record(2, 0.0)]
    found = advantages(select(records, efficient_rewarding=True))
    assert found[f"{TASK}/0/1/0"] > 0.5 > found[f"{TASK}/1/1/0"] > 0
    assert select(records, efficient_rewarding=True).scores == (1.0, 1.0, 0.0)


def test_filters_of_the_group_apply() -> None:
    records = [
        record(0, 1.0),
        record(1, 1.0, versions=(3, 3)),
        record(2, 0.0, outcome="turns_limit"),
    ]
    group = select(records, min_turns=2, reserve_context_error_count=0)
    assert group.dropped_records == {f"{TASK}/0": "few_turns", f"{TASK}/2": "context_limit"}


@pytest.mark.parametrize(
    "flags",
    [
        {"advantage_estimator": "group_mean"},
        {"advantage_estimator": "group_std"},
        {"adv_scaling": 3.0},
        {"sign_clip": False},
        {"drop_zero_advantage": False},
        {"skip_non_positive_advantage": True},
        {"minimal_advantage": -0.1},
        {"min_score_spread": 1.5},
        {"balance_sample": True},
        {"min_turns": 2},
        {"reserve_context_error_count": 0},
        {"efficient_rewarding": True},
        {"max_staleness": 0},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_every_flag_of_selection_reaches_the_turns(flags: dict[str, Any]) -> None:
    records = [
        record(0, 1.0),
        record(1, 0.7, versions=(3, 3), overrides=(0.0, -0.3)),
        record(2, 0.0, outcome="turns_limit"),
        record(3, 0.1),
        record(4, 0.2),
        record(5, 0.15, versions=(2,)),
    ]
    assert advantages(select(records, **flags)) != advantages(select(records))


@pytest.mark.parametrize("shaping", [{}, {"efficient_rewarding": True}])
def test_records_without_sampled_tokens_shift_no_baseline(shaping: dict[str, Any]) -> None:
    phantoms = [make_record([], 0.0, traj_id=n, task_id=TASK) for n in (2, 3)]
    group = select([record(0, 1.0), record(1, 1.0), *phantoms], **shaping)
    assert not group.usable
    assert group.dropped_records == {
        f"{TASK}/0": "zero_variance",
        f"{TASK}/1": "zero_variance",
        f"{TASK}/2": "no_targets",
        f"{TASK}/3": "no_targets",
    }
    assert group.scores == (1.0, 1.0, 0.0, 0.0)
    alone = select([record(0, 1.0), record(1, 0.0)])
    assert advantages(select([record(0, 1.0), record(1, 0.0), *phantoms])) == advantages(alone)


def test_a_record_without_sampled_tokens_has_no_targets() -> None:
    silent = make_record([make_turn(f"{TASK}/0", 0, [1], [])], 0.0)
    group = select([silent, record(1, 1.0), record(2, 0.0)])
    assert group.dropped_records == {f"{TASK}/0": "no_targets"}


def test_records_of_two_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="exactly one task"):
        select([record(0, 1.0), record(0, 0.0, task_id="train/0/q1")])


def seeing(number: int, score: float, **changes: object) -> DBRecordData:
    """A record whose prompt begins with an image."""
    seen = record(number, score)
    turn = seen.turns[0]
    shown = {
        "added_ids": np.concatenate([[99], turn.added_ids]).astype(np.int32),
        "added_images": ("sha256:aa",),
        "image_placeholder": 99,
        "image_processor": {"size": 3},
    }
    turn = turn.model_copy(update=shown | changes)
    return seen.model_copy(update={"turns": (turn,)})


IMAGE = ShownImage(key="a", data=b"", processor={"size": 3}, image_token_id=99, num_positions=5)
BOOK = ImageBook({("sha256:aa", processor_key({"size": 3})): IMAGE}, token_id=99)


def test_an_image_takes_its_positions_in_the_prompt() -> None:
    group = select([seeing(0, 1.0), record(1, 0.0)], images=BOOK)
    turn = group.turns[0]
    assert turn.full_ids[:5].tolist() == [99] * 5
    assert [(placed.start, placed.end) for placed in turn.images] == [(0, 5)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_processor": {"size": 4}}, "no_targets"),
        ({"prompt_positions": 3}, "positions"),
        ({"output_ids": np.array([99], np.int32), "output_logprobs": [-1.0]}, "placeholder"),
    ],
)
def test_a_record_whose_images_were_read_otherwise_is_left_out(
    changes: dict[str, object], reason: str
) -> None:
    group = select([seeing(0, 1.0, **changes), record(1, 0.0)], images=BOOK)
    assert group.dropped_records == {f"{TASK}/0": reason}


def test_the_token_of_an_image_in_a_text_is_left_out_too() -> None:
    seen = record(0, 1.0)
    output = {"output_ids": np.array([99, 4], np.int32), "output_logprobs": [-1.0, -1.0]}
    turn = seen.turns[0].model_copy(update=output)
    seen = seen.model_copy(update={"turns": (turn,)})
    group = select([seen, record(1, 0.0)], images=BOOK)
    assert group.dropped_records == {f"{TASK}/0": "placeholder"}
