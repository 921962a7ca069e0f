"""`Score`: what a scorer made of a Record."""

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
    """Rewards of single turns by index, where the scorer gives any; None, and turns past the last
    entry, have what their rollout gave them (`DispatchedSamplingTask.reward`). A turn is trained on
    what the record earned from it on, `value` at the end included, against the same of the other
    records of its group."""
    value_includes_steps: bool = False
    """`value` is the whole return, including step scores, as in Gym-style environments; by default
    it is added to them."""
    scored_at: datetime = Field(default_factory=utc_now)

    @field_validator("value")
    @classmethod
    def _finite(cls, value: float) -> float:
        # One NaN would make the baseline of its group NaN, and thereby the whole step.
        if not math.isfinite(value):
            raise ValueError(f"a score must be a finite number, not {value}")
        return value


def score_of(
    scores: Iterable[Score | None], scorer: str, version: str | None = None
) -> Score | None:
    """Return the last of `scores` that came from this scorer (in this version), if any."""
    fitting = [
        score
        for score in scores
        if score is not None and score.scorer == scorer and version in (None, score.version)
    ]
    return fitting[-1] if fitting else None
