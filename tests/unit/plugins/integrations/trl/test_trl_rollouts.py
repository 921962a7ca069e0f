"""One sequence of a rollout's tree."""

import numpy as np
import pytest
from harness.trees import make_turn

from agentrl.errors import TrainingError
from agentrl.plugins.integrations.trl.trl_rollouts import longest_sequence

R = "train/0/q0/0"


def test_a_conversation_is_one_sequence_with_loss_where_the_model_spoke() -> None:
    turns = [
        make_turn(R, 0, [1, 2, 3], [10, 11], logprobs=[-0.1, -0.2]),
        make_turn(R, 1, [4, 5], [12], parent=0, shared_len=5, logprobs=[-0.3]),
    ]
    found = longest_sequence(turns)
    assert found is not None
    assert found.prompt_ids.tolist() == [1, 2, 3]
    assert found.completion_ids.tolist() == [10, 11, 4, 5, 12]
    assert found.mask.tolist() == [True, True, False, False, True]
    np.testing.assert_allclose(found.logprobs, [-0.1, -0.2, 0.0, 0.0, -0.3])
    assert found.num_sampled == 3


def test_of_several_conversations_the_one_with_most_sampled_tokens_is_taken() -> None:
    turns = [
        make_turn(R, 0, [1, 2, 3], [10]),
        make_turn(R, 1, [7, 8], [20, 21, 22]),
        make_turn(R, 2, [5], [11], parent=0, shared_len=4),
    ]
    found = longest_sequence(turns)
    assert found is not None
    assert found.prompt_ids.tolist() == [7, 8]
    assert found.completion_ids.tolist() == [20, 21, 22]


def test_a_replaced_end_of_a_reply_carries_no_loss() -> None:
    turns = [
        make_turn(R, 0, [1, 2], [10, 11], logprobs=[-0.1, -0.2]),
        make_turn(R, 1, [99, 5], [12], parent=0, shared_len=3, logprobs=[-0.3]),
    ]
    found = longest_sequence(turns)
    assert found is not None
    assert found.completion_ids.tolist() == [10, 99, 5, 12]
    assert found.mask.tolist() == [True, False, False, True]
    np.testing.assert_allclose(found.logprobs, [-0.1, 0.0, 0.0, -0.3])


def test_a_call_that_cannot_be_parsed_stays_in_the_sequence_without_loss() -> None:
    turns = [
        make_turn(R, 0, [1, 2], [10, 11], advantage=0.0),
        make_turn(R, 1, [5], [12], parent=0, shared_len=4),
    ]
    found = longest_sequence(turns)
    assert found is not None
    assert found.completion_ids.tolist() == [10, 11, 5, 12]
    assert found.mask.tolist() == [False, False, False, True]


def test_a_rollout_of_other_models_calls_has_no_sequence() -> None:
    assert longest_sequence([make_turn(R, 0, [], [], trainable=False)]) is None
    assert longest_sequence([]) is None


def test_a_rollout_that_contains_images_is_refused_by_name() -> None:
    turn = make_turn(R, 0, [1], [2]).model_copy(update={"added_images": ("sha256:a",)})
    with pytest.raises(TrainingError, match=f"record {R} contains images"):
        longest_sequence([turn])
