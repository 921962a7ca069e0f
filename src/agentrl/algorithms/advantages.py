"""Advantages of a group's records from their scores."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

AdvantageKind = Literal["leave_one_out", "group_mean", "group_std", "reinforce_plus_plus"]

RIGHT_ABOVE = 0.5
"""Scores above this count as right, all others as wrong."""

_NO_SPREAD = 1e-9
"""A deviation below this is rounding."""


def group_advantages(
    scores: Sequence[float | None],
    *,
    kind: AdvantageKind = "leave_one_out",
    adv_scaling: float = 1.0,
    sign_clip: bool = True,
) -> np.ndarray:
    """Return the advantage of each record of one group.

    - `leave_one_out` (RLOO, 2402.14740): score minus the mean of the other scores;
    - `group_mean` (Dr.GRPO, 2503.20783): score minus the mean;
    - `group_std` (GRPO, 2402.03300): the same over the population standard deviation, 0 when all
      scores are equal;
    - `reinforce_plus_plus` (2501.03262, with group baseline): score minus the mean; the whole step
      is then normalized by `step_normalized`.

    With fewer than two scores there is no baseline and the advantage is 0.

    Args:
        scores: one entry a record; None where the infrastructure failed. Those are in no baseline.
        kind: the estimator.
        adv_scaling: factor on the result.
        sign_clip: wrong records (score <= 0.5) get no positive and right ones no negative
            advantage.

    Returns:
        float64 [G]; NaN where the score is missing.
    """
    values = np.array([np.nan if score is None else score for score in scores], dtype=np.float64)
    scored = ~np.isnan(values)
    advantages = np.full(len(values), np.nan)
    advantages[scored] = _centred(values[scored], kind)
    if sign_clip:
        advantages = clip_signs(advantages, values > RIGHT_ABOVE)
    return advantages * adv_scaling


def turn_advantages(
    advantage: float,
    overrides: Sequence[float | None],
    *,
    right: bool,
    adv_scaling: float = 1.0,
    sign_clip: bool = True,
) -> np.ndarray:
    """Return the advantages of one record's turns, float64 [T].

    A turn's override (0 for a malformed tool call, say) can only lower its advantage; signs are
    clipped afterwards and the scale comes last.

    Args:
        advantage: the record's, neither clipped nor scaled.
        overrides: per turn, None where there is none.
        right: whether the record's score counts as right.
        adv_scaling: factor on the result.
        sign_clip: as in `group_advantages`.
    """
    combined = np.array(
        [advantage if override is None else min(advantage, override) for override in overrides],
        dtype=np.float64,
    )
    if sign_clip:
        combined = clip_signs(combined, np.full(len(combined), right))
    return combined * adv_scaling


def step_normalized(advantages: np.ndarray, num_targets: np.ndarray) -> np.ndarray:
    """Return advantages with mean 0 and standard deviation 1 over the step's target tokens.

    Advantages that are all equal become 0.

    Args:
        advantages: of every turn of the step [T].
        num_targets: target tokens of every turn [T].
    """
    if len(advantages) == 0:
        return advantages
    mean = np.average(advantages, weights=num_targets)
    deviation = np.sqrt(np.average((advantages - mean) ** 2, weights=num_targets))
    if deviation <= _NO_SPREAD:
        return np.zeros(len(advantages))
    normalized: np.ndarray = (advantages - mean) / deviation
    return normalized


def clip_signs(advantages: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return advantages with the wrong sign set to 0 (NaN stays NaN)."""
    clipped: np.ndarray = np.where(right, np.maximum(advantages, 0.0), np.minimum(advantages, 0.0))
    return clipped


def _centred(values: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    if len(values) < 2:
        return np.zeros(len(values))
    centred: np.ndarray = values - values.mean()
    if kind == "leave_one_out":
        return centred * (len(values) / (len(values) - 1))
    if kind == "group_std":
        deviation = values.std()
        return centred / deviation if deviation > 0 else np.zeros(len(values))
    return centred
