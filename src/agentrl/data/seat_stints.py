"""Groups a record's turns by seat; each stint of a seat has its own return.

Input: a record. Output: its `SeatStint`s. A record of one agent is one stint, of all of its turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.schema import DBRecordData, DispatchedSamplingTask

NO_SEAT = ""
"""Seat of the turns of a rollout that has one agent."""


@dataclass(frozen=True)
class SeatStint:
    """What a seat did in one record, from its first to its last call."""

    seat: str
    turns: tuple[DispatchedSamplingTask, ...]
    """Its turns, in order; the steps of its return are counted over these alone."""
    step_rewards: tuple[float | None, ...]
    """The reward of each turn, in addition to the final reward."""
    reward: float | None
    """Final reward; None if the record has no score."""
    has_own_reward: bool
    """The final reward is the stint's own, not the record's score."""
    is_trained: bool


def seat_stints(record: DBRecordData) -> list[SeatStint]:
    """Return the stints of a record's seats, in the order of their first turns."""
    by_stint: dict[tuple[str, int], list[DispatchedSamplingTask]] = {}
    for turn in record.turns:
        key = (NO_SEAT, 0) if turn.seat is None else (turn.seat.name, turn.seat.stint)
        by_stint.setdefault(key, []).append(turn)
    if not by_stint:
        by_stint[NO_SEAT, 0] = []
    steps = step_rewards(record)
    return [_stint(record, name, turns, steps) for (name, _), turns in by_stint.items()]


def step_rewards(record: DBRecordData) -> list[float | None]:
    """Return each turn's reward from the scorer, else from the rollout; None if it has none."""
    steps = () if record.score is None else record.score.step_scores
    scored = [steps[index] if index < len(steps) else None for index in range(len(record.turns))]
    return [
        turn.reward if step is None else step
        for turn, step in zip(record.turns, scored, strict=True)
    ]


def _stint(
    record: DBRecordData,
    name: str,
    turns: Sequence[DispatchedSamplingTask],
    steps: Sequence[float | None],
) -> SeatStint:
    seat = turns[0].seat if turns else None
    score = record.score
    keeps_own = seat is not None and score is not None and score.seats_keep_rewards
    own = seat.reward if seat is not None and keeps_own else None
    value = None if score is None else score.value
    return SeatStint(
        seat=name,
        turns=tuple(turns),
        step_rewards=tuple(steps[turn.index] for turn in turns),
        reward=value if own is None else own,
        has_own_reward=own is not None,
        is_trained=seat is None or seat.trained,
    )
