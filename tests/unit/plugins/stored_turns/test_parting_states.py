"""States of a group whose scores part, from attempts that are written out."""

from collections.abc import Sequence

import numpy as np

from agentrl.plugins.stored_turns.parting_states import parting_states, scores_part
from agentrl.schema import DispatchedSamplingTask, Record, SamplingParams, Score

EMPTY = np.empty(0, dtype=np.float32)


def attempt(number: int, score: float | None) -> Record:
    return Record(
        id=f"train/0/q/{number}",
        task_id="train/0/q",
        split="train",
        traj_id=number,
        order=0,
        score=None if score is None else Score(scorer="exact", value=score),
    )


def turns_of(
    record: Record, replies: Sequence[int], **last: object
) -> list[DispatchedSamplingTask]:
    """Return turns with one id each, which follow one another after the question's id 1."""
    turns: list[DispatchedSamplingTask] = []
    for index, reply in enumerate(replies):
        turns.append(
            DispatchedSamplingTask(
                id=f"{record.id}/{index}",
                record_id=record.id,
                task_id=record.task_id,
                attempt=1,
                index=index,
                parent=index - 1 if index else None,
                shared_len=1 + 2 * index if index else 0,
                added_ids=[9] if index else [1, 1],
                output_ids=[reply],
                output_logprobs=EMPTY,
                version_spans=(),
                finish_reason="stop",
                sampling_params=SamplingParams(),
            )
        )
    turns[-1] = turns[-1].model_copy(update=last)
    return turns


def states(
    *attempts: tuple[float, Sequence[int]], shares: tuple[float, float] = (0.2, 0.8)
) -> list[tuple[int, int, float]]:
    """Return turn, attempt and share of the states of attempts, each a score and its replies."""
    records = [attempt(number, score) for number, (score, _) in enumerate(attempts)]
    turns = {
        record.id: turns_of(record, replies)
        for record, (_, replies) in zip(records, attempts, strict=True)
    }
    found = parting_states(records, turns, shares)
    return [(len(state.turns) - 1, state.record.traj_id, state.share_right) for state in found]


def test_states_lie_where_right_and_wrong_attempts_go_on_from_the_same_prompt() -> None:
    found = states((1, [5, 6, 7]), (0, [5, 6, 8]), (1, [5, 3, 7]), (0, [4, 6, 7]))
    assert found == [(2, 0, 0.5), (1, 0, 2 / 3)]


def test_of_equally_many_turns_the_share_nearest_to_one_half_counts() -> None:
    found = states((1, [5, 1]), (1, [5, 2]), (0, [5, 3]), (1, [6, 1]), (0, [6, 2]))
    assert found == [(1, 3, 0.5)]


def test_there_are_none_at_the_question_alone_or_beyond_the_shares() -> None:
    assert states((1, [5, 1]), (0, [6, 1])) == []
    assert states((1, [5, 1]), (1, [5, 2])) == []
    many = [(0.0, [5, number]) for number in range(9)]
    assert states((1, [5, 20]), *many) == []
    assert states((1, [5, 20]), *many, shares=(0.1, 0.5)) == [(1, 0, 0.1)]


def test_a_turn_that_the_policy_did_not_sample_is_no_state() -> None:
    first, second = attempt(0, 1), attempt(1, 0)
    turns = {
        first.id: turns_of(first, [5, 6], trainable=False),
        second.id: turns_of(second, [5, 7], trainable=False),
    }
    assert parting_states([first, second], turns, (0.2, 0.8)) == []


def test_scores_part_if_some_are_right_and_some_are_not() -> None:
    assert scores_part([attempt(0, 1), attempt(1, 0.5)])
    assert not scores_part([attempt(0, 1), attempt(1, 0.6)])
