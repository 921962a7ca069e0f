"""Where the scores of a group part: the states through which right and wrong attempts both went.

A state is a prompt: the exact ids that the model read. Attempts share one as long as model and tools
said the same. Pure functions of stored records and turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.algorithms.advantages import RIGHT_ABOVE
from agentrl.schema import DispatchedSamplingTask, Record, rebuild_prompts


@dataclass(frozen=True)
class PartingState:
    """A turn behind the question from which a group's attempts went on to different scores."""

    record: Record
    """The first of the attempts that went through it."""
    turns: tuple[DispatchedSamplingTask, ...]
    """Its turns, to that with the state's prompt, at least two."""
    share_right: float
    """Right attempts among those that went through it."""


def parting_states(
    records: Sequence[Record],
    turns: Mapping[str, Sequence[DispatchedSamplingTask]],
    shares: tuple[float, float],
) -> list[PartingState]:
    """Return the states behind the question at which the scores of a group part, the last first.

    Args:
        records: scored attempts at one question.
        turns: those of each attempt, by its id.
        shares: lowest and highest share of right attempts among those through the state.

    Returns:
        One of each number of turns before it: that whose share is nearest to one half, then the first.
    """
    through: dict[bytes, list[tuple[Record, int]]] = {}
    for record in sorted(records, key=lambda one: one.traj_id):
        own = turns[record.id]
        for turn, ids in zip(own, rebuild_prompts(own), strict=True):
            if turn.index and turn.trainable and _is_chain(own[: turn.index + 1]):
                through.setdefault(ids.tobytes(), []).append((record, turn.index))
    found: dict[int, list[PartingState]] = {}
    for attempts in through.values():
        share = sum(_is_right(record) for record, _ in attempts) / len(attempts)
        if len(attempts) > 1 and 0 < share < 1 and shares[0] <= share <= shares[1]:
            record, index = attempts[0]
            state = PartingState(record, tuple(turns[record.id][: index + 1]), share)
            found.setdefault(index, []).append(state)
    return [
        min(found[index], key=lambda one: abs(one.share_right - 0.5))
        for index in sorted(found, reverse=True)
    ]


def scores_part(records: Sequence[Record]) -> bool:
    """Return whether scored attempts are right and wrong."""
    return len({_is_right(record) for record in records}) > 1


def _is_right(record: Record) -> bool:
    return record.score is not None and record.score.value > RIGHT_ABOVE


def _is_chain(turns: Sequence[DispatchedSamplingTask]) -> bool:
    """Return whether each turn continues the one before, by an agent that is alone and sees no image."""
    return all(
        turn.parent == (turn.index - 1 if turn.index else None)
        and turn.seat is None
        and not turn.added_images
        for turn in turns
    )
