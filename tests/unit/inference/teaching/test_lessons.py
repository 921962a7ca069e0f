"""A conversation costs one sequence, and every sampled token finds its place in it."""

import numpy as np
from harness.trees import make_turn

from agentrl.inference.teaching.lessons import lessons

RECORD = "train/0/q0/0"


def test_turns_that_extend_each_other_are_one_sequence() -> None:
    turns = [
        make_turn(RECORD, 0, [1, 2], [3, 4]),
        make_turn(RECORD, 1, [5], [6, 7], parent=0, shared_len=4),
        # The prompt drops the last sampled token of turn 1, whose logprob is in no other sequence.
        make_turn(RECORD, 2, [8, 9], [10], parent=1, shared_len=6),
    ]
    longest, other = lessons(turns)
    assert longest.ids.tolist() == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert longest.places == {turns[2].id: (8, 9), turns[0].id: (2, 4)}
    assert other.places == {turns[1].id: (5, 7)}
    assert (longest.start, other.start) == (1, 4)
    # The logprob of each token is the token here.
    logprobs = longest.ids[longest.start + 1 :].astype(np.float32)
    given = {key: values.tolist() for key, values in longest.by_turn(logprobs).items()}
    assert given == {turns[0].id: [3, 4], turns[2].id: [10]}


def test_what_no_teacher_can_read_is_in_no_sequence() -> None:
    seen = make_turn(RECORD, 0, [1, 2], [3]).model_copy(
        update={"added_images": ("image",), "image_placeholder": 2}
    )
    untrained = make_turn(RECORD, 1, [1, 2], [3]).model_copy(update={"trainable": False})
    silent = make_turn(RECORD, 2, [1, 2], [])
    fresh = make_turn(RECORD, 3, [4], [5])
    assert [one.places for one in lessons([seen, untrained, silent, fresh])] == [{fresh.id: (1, 2)}]
