"""Teachers' logprobs become advantages and inputs of the loss; a missing one never counts as 0."""

from typing import Any

import numpy as np
import pytest
from harness.trees import make_record, make_turn

from agentrl.config.sections import AlgorithmSection
from agentrl.data import select_group
from agentrl.data.batch import build_training_step
from agentrl.data.select import SelectedGroup
from agentrl.data.tokens import TurnTokens
from agentrl.schema import DBRecordData

TASK = "train/0/q0"
BEHAVIOR = np.array([-1.0, -2.0], dtype=np.float32)


def record(
    traj_id: int, score: float, *, temperature: float = 1.0, **teachers: list[float]
) -> DBRecordData:
    turn = make_turn(f"{TASK}/{traj_id}", 0, [1, 2], [4, 5], versions=[(3, 0, 2)])
    turn = turn.model_copy(
        update={
            "output_logprobs": BEHAVIOR,
            "sampling_params": turn.sampling_params.model_copy(update={"temperature": temperature}),
            "teacher_logprobs": {
                name: np.array(values, dtype=np.float32) for name, values in teachers.items()
            },
        }
    )
    return make_record([turn], score, traj_id=traj_id, task_id=TASK)


def select(records: list[DBRecordData], **flags: Any) -> tuple[SelectedGroup, AlgorithmSection]:
    algorithm = AlgorithmSection(**flags)
    return select_group(records, algorithm, policy_version=3), algorithm


def token_advantages(turn: TurnTokens) -> np.ndarray:
    assert turn.token_advantages is not None
    return turn.token_advantages


def test_opd_is_minus_the_sampled_reverse_kl_of_every_token() -> None:
    equal = [record(0, 1.0, big=[-0.5, -4.0]), record(1, 1.0, big=[-1.0, -1.5])]
    group, algorithm = select(equal, advantage_estimator="opd", teachers=("big",))
    found = [token_advantages(turn) for turn in group.turns]
    np.testing.assert_allclose(found, [[0.5, -2.0], [0.0, 0.5]])
    assert [turn.advantage for turn in group.turns] == [-0.75, 0.25]
    step = build_training_step([group], algorithm, policy_version=3, token_budget=100)
    ((batch,),) = step.micro_batches
    np.testing.assert_allclose(np.sort(batch.advantages), [-2.0, 0.0, 0.5, 0.5])
    assert batch.teacher_logprobs.shape == (4, 1)


def test_the_mixture_weighs_rewards_and_the_mean_of_the_teachers() -> None:
    records = [
        record(0, 1.0, big=[-0.5, -4.0], small=[-1.5, -2.0]),
        record(1, 0.0, big=[-1.0, -1.5], small=[-1.0, -2.5]),
    ]
    group, _ = select(records, teachers=("small", "big"), teacher_weight=0.25, adv_scaling=2.0)
    # Rewards 1 and 0: the leave-one-out advantages are 1 and -1, scaled 2 and -2.
    right, wrong = (token_advantages(turn) for turn in group.turns)
    np.testing.assert_allclose(right, [1.5 + 0.5 * 0.0, 1.5 + 0.5 * -1.0])
    np.testing.assert_allclose(wrong, [-1.5, -1.5])
    assert group.turns[0].teacher_logprobs is not None
    np.testing.assert_array_equal(group.turns[0].teacher_logprobs, [[-1.5, -0.5], [-2.0, -4.0]])


def test_teachers_of_a_users_loss_leave_the_advantages_alone() -> None:
    records = [record(0, 1.0, big=[-0.5, -4.0]), record(1, 0.0, big=[-1.0, -1.5])]
    group, _ = select(records, teachers=("big",))
    assert [turn.advantage for turn in group.turns] == [1.0, -1.0]
    assert all(turn.token_advantages is None for turn in group.turns)
    assert all(turn.teacher_logprobs is not None for turn in group.turns)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_turn_without_its_teacher_is_left_out_and_said(weight: float) -> None:
    records = [record(0, 1.0, big=[-0.5, -4.0]), record(1, 0.0)]
    group, _ = select(records, teachers=("big",), teacher_weight=weight)
    assert [turn.record_id for turn in group.turns] == [f"{TASK}/0"]
    assert group.dropped_records == {f"{TASK}/1": "no_teacher"}


def test_a_turn_of_another_temperature_has_no_teacher_advantage() -> None:
    records = [record(0, 1.0, temperature=0.7, big=[-0.5, -4.0]), record(1, 0.0, big=[-0.5, -4.0])]
    group, _ = select(records, teachers=("big",), advantage_estimator="opd")
    assert group.dropped_records == {f"{TASK}/0": "temperature"}
    assert len(group.turns) == 1
