"""Experts of a path are put together from the turns that computed its tokens first."""

import numpy as np
import pytest
from harness.trees import make_record, make_turn

from agentrl.config.sections import AlgorithmSection
from agentrl.data.select import select_group
from agentrl.data.tokens import (
    TurnTokens,
    agree_on_experts,
    turn_tokens,
    with_routed_experts,
)
from agentrl.schema import DispatchedSamplingTask
from agentrl.schema.routed_experts import pack_experts, stored_experts


def routed(turn: DispatchedSamplingTask, *experts: int) -> DispatchedSamplingTask:
    """The turn with one layer of one expert a token."""
    routes, size = pack_experts(np.array(experts)[:, None])
    return turn.model_copy(update={"routed_experts": routes, "routed_bytes": size})


def conversation(record_id: str = "train/0/q0/0") -> list[DispatchedSamplingTask]:
    """Three tokens in and two out; one more in and two out; a branch after the second token."""
    first = make_turn(record_id, 0, [1, 2, 3], [4, 5])
    second = make_turn(record_id, 1, [6], [7, 8], parent=0, shared_len=5)
    third = make_turn(record_id, 2, [9], [10, 11], parent=1, shared_len=2)
    return [
        routed(first, 10, 20, 30, 40),  # its last token, 5, was not computed
        routed(second, 50, 60, 70),  # from 5 on
        routed(third, 21, 90, 100),  # from the last of the shared tokens on
    ]


def experts_of(turn: TurnTokens) -> np.ndarray:
    assert turn.routed_experts is not None
    return turn.routed_experts


def test_every_token_has_the_experts_of_the_turn_that_computed_it() -> None:
    turns = conversation()
    found = {turn.turn_id: turn for turn in with_routed_experts(turn_tokens(turns), turns)}
    choices = [experts_of(found[turn.id])[:, 0].tolist() for turn in turns]
    assert choices == [[10, 20, 30, 40], [10, 20, 30, 40, 50, 60, 70], [10, 21, 90, 100]]
    assert all(len(experts_of(turn)) == len(turn.path) for turn in found.values())


def test_tokens_of_turns_that_stored_nothing_are_left_to_the_trainers_router() -> None:
    turns = conversation()
    turns[0] = turns[0].model_copy(update={"routed_experts": b""})
    _, second, third = with_routed_experts(turn_tokens(turns), turns)
    assert experts_of(second)[:, 0].tolist() == [-1, -1, -1, -1, 50, 60, 70]
    assert experts_of(third)[:, 0].tolist() == [-1, 21, 90, 100]
    plain = [turn.model_copy(update={"routed_experts": b""}) for turn in turns]
    assert {turn.routed_experts for turn in with_routed_experts(turn_tokens(plain), plain)} == {
        None
    }


def test_selected_turns_know_their_experts() -> None:
    records = [
        make_record(conversation(f"train/0/q0/{number}"), score, traj_id=number)
        for number, score in enumerate((1.0, 0.0))
    ]
    group = select_group(records, AlgorithmSection(), policy_version=0)
    assert len(group.turns) == 6
    assert all(len(experts_of(turn)) == len(turn.path) for turn in group.turns)


@pytest.mark.parametrize(
    ("second", "num_conflicts"), [((), 0), ((10, 20, 30, 40), 0), ((10, 21, 30, 41), 2)]
)
def test_turns_that_share_tokens_agree_on_the_first_choice(
    second: tuple[int, ...], num_conflicts: int
) -> None:
    turns = [make_turn(f"train/0/q0/{n}", 0, [1, 2, 3], [4, 5 + n]) for n in (0, 1)]
    turns[0] = routed(turns[0], 10, 20, 30, 40)
    turns[1] = routed(turns[1], *second) if second else turns[1]
    agreed, found = agree_on_experts(with_routed_experts(turn_tokens(turns), turns))
    assert [experts_of(turn)[:, 0].tolist() for turn in agreed] == [[10, 20, 30, 40]] * 2
    assert found == num_conflicts


@pytest.mark.parametrize(("largest", "size"), [(255, 1), (256, 2)])
def test_an_expert_takes_one_byte_while_there_are_no_more_than_256(largest: int, size: int) -> None:
    turn = make_turn("r/0", 0, [1, 2], [3])
    choices = np.array([[0, -1], [largest, 1]])  # -1: a layer without experts
    routes, found = pack_experts(choices)
    assert (found, len(routes)) == (size, 4 * size)
    stored = turn.model_copy(update={"routed_experts": routes, "routed_bytes": found})
    unpacked = stored_experts(stored)
    assert unpacked is not None
    assert unpacked.tolist() == [[0, 0], [largest, 1]]


def test_experts_that_do_not_fit_the_tokens_are_an_error() -> None:
    turn = make_turn("r/0", 0, [1, 2], [3])
    with pytest.raises(ValueError, match="turn r/0/1/0 has 3 experts for 2 tokens"):
        stored_experts(turn.model_copy(update={"routed_experts": b"abc"}))
