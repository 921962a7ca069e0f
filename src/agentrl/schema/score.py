"""`Score`: the result of a scorer for a Record."""

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from pydantic import Field, FiniteFloat, field_validator

from agentrl.schema.base import Value, utc_now


class Score(Value):
    """A scorer's verdict: a fact with its origin."""

    scorer: str
    version: str = "1"
    value: float
    """A finite number."""
    detail: str = ""
    """Details for readers (a judge's reply, a normalized answer)."""
    inputs: dict[str, Any] = Field(default_factory=dict)
    """Inputs of the scorer in addition to the record (model answer, reference)."""
    parts: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Components of `value`, by name; for display only."""
    step_scores: tuple[FiniteFloat | None, ...] = ()
    """Rewards of single turns by index, if the scorer gives any. Turns with None, and turns past the
    last entry, keep the reward of their rollout (`DispatchedSamplingTask.reward`). A turn is trained on
    the rewards of its record from that turn on, including the final `value`, relative to those of the
    other records of its group."""
    value_includes_steps: bool = False
    """`value` is the whole return, including step scores, as in Gym-style environments; by default
    it is added to them."""
    seats_keep_rewards: bool = False
    """Turns of seats that have their own rewards (`Seat.reward`) are trained on these, not on
    `value`. True for scores that are the environment's own reward; a scorer's value reaches the
    turns of all seats."""
    scored_at: datetime = Field(default_factory=utc_now)

    @field_validator("value")
    @classmethod
    def _finite(cls, value: float) -> float:
        # One NaN would turn the baseline of its group, and thus the whole step, into NaN.
        if not math.isfinite(value):
            raise ValueError(f"a score must be a finite number, not {value}")
        return value


def score_of(
    scores: Iterable[Score | None], scorer: str, version: str | None = None
) -> Score | None:
    """Return the last of `scores` that came from this scorer (in this version), if any."""
    matching = [
        score
        for score in scores
        if score is not None and score.scorer == scorer and version in (None, score.version)
    ]
    return matching[-1] if matching else None
