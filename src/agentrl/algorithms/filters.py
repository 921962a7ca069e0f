"""Selects the records of a group to train on, from facts about the group alone.

Every filter returns a reason for what it drops; reasons end up in the ledger and the metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from agentrl.algorithms.advantages import RIGHT_ABOVE
from agentrl.algorithms.formula_registry import users_function
from agentrl.errors import UserCodeError
from agentrl.schema.training import EQUAL_SCORES

RecordDrop = Literal[
    "no_score",
    "zero_variance",
    "group_filter",
    "balance",
    "few_turns",
    "context_limit",
    "stale",
    "no_targets",
]
CONTEXT_LIMITS = frozenset({"length_limit", "turns_limit"})
"""Outcomes that `reserve_context_error_count` rations."""
_ROUNDING_TOLERANCE = 1e-9
"""Tolerance of comparisons with `min_score_spread`."""
_SHIFT_RANGE = 0.2
"""Distance between the largest and the smallest shift of `efficiency_shaped`."""


@dataclass(frozen=True)
class RecordFacts:
    """What the filters know about a record."""

    record_id: str
    score: float | None
    """None: the record enters no statistics of its group."""
    num_turns: int
    outcome: str | None
    has_targets: bool = True
    """Whether anything was sampled from the policy."""
    has_step_scores: bool = False
    """Whether some of its turns have their own scores."""
    seat_scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Final rewards of the runs of each trained seat, if the rollout has several agents."""

    @property
    def is_right(self) -> bool:
        """Whether the record has a score, and the score counts as right."""
        return self.score is not None and self.score > RIGHT_ABOVE


@dataclass(frozen=True)
class GroupFacts:
    """What the filters know about a group."""

    task_id: str
    records: tuple[RecordFacts, ...]

    @property
    def scores(self) -> tuple[float | None, ...]:
        """The scores in record order."""
        return tuple(record.score for record in self.records)


def _has_learning_signal(group: GroupFacts, min_score_spread: float) -> bool:
    if any(record.has_step_scores and record.score is not None for record in group.records):
        return True
    # Seats are compared with themselves: in a game, each seat's rewards may differ over the records
    # although their mean, the records' score, never does.
    compared: dict[str, list[float]] = {}
    for record in group.records:
        if record.score is not None:
            for seat, scores in (record.seat_scores or {"": (record.score,)}).items():
                compared.setdefault(seat, []).extend(scores)
    return any(
        max(scores) - min(scores) >= min_score_spread - _ROUNDING_TOLERANCE
        for scores in compared.values()
    )


def filter_group(
    group: GroupFacts,
    *,
    min_score_spread: float = 0.1,
    own_filter: str | None = None,
    balance_sample: bool = False,
    min_turns: int = 0,
    reserve_context_error_count: int = -1,
    seed: int = 0,
) -> tuple[RecordDrop | None, ...]:
    """Return for each record the reason to leave it out, or None to train on it.

    Records without a score or sampled tokens are always left out. A group whose scores spread by
    less than `min_score_spread` (those of every seat, if there are several) teaches nothing and is
    left out as a whole, unless some of its turns have their own scores. Next comes the user's own
    filter, with reason `group_filter`. Then either
    `balance_sample` applies (with n = min(wrong, right), n + 1 wrong and n + 2 right records stay,
    drawn by `seed`), or both `min_turns` and `reserve_context_error_count` do.

    Args:
        group: the facts.
        min_score_spread: smallest difference between best and worst score.
        own_filter: reference of a function of `GroupFacts` to one bool a record; False leaves it out.
        balance_sample: keep about as many right as wrong records.
        min_turns: right records with fewer turns are left out.
        reserve_context_error_count: number of records that reached a length or turn limit and stay;
            -1 for all.
        seed: draws which records stay.
    """
    reasons: list[RecordDrop | None] = [_unusable_reason(record) for record in group.records]
    if not _has_learning_signal(group, min_score_spread):
        return tuple(reason or EQUAL_SCORES for reason in reasons)
    if own_filter is not None:
        kept = kept_by(own_filter, group)
        reasons = [
            reason or (None if keep else "group_filter")
            for reason, keep in zip(reasons, kept, strict=True)
        ]
    rng = np.random.default_rng([seed, *group.task_id.encode()])
    candidates = [index for index, reason in enumerate(reasons) if reason is None]
    if balance_sample:
        right = [index for index in candidates if group.records[index].is_right]
        wrong = [index for index in candidates if not group.records[index].is_right]
        smaller = min(len(right), len(wrong))
        for side, quota in ((wrong, smaller + 1), (right, smaller + 2)):
            for index in _surplus(side, quota, rng):
                reasons[index] = "balance"
        return tuple(reasons)
    for index in candidates:
        record = group.records[index]
        if record.is_right and record.num_turns < min_turns:
            reasons[index] = "few_turns"
    if reserve_context_error_count >= 0:
        limited = [
            index
            for index in candidates
            if reasons[index] is None and group.records[index].outcome in CONTEXT_LIMITS
        ]
        for index in _surplus(limited, reserve_context_error_count, rng):
            reasons[index] = "context_limit"
    return tuple(reasons)


def kept_by(own_filter: str, group: GroupFacts) -> tuple[bool, ...]:
    """Return the decisions of a user's filter, one a record.

    Args:
        own_filter: reference of the function.
        group: the facts.

    Raises:
        UserCodeError: the function failed, or returned something else.
    """
    result = users_function(own_filter, "--group_filter")(group)
    is_list = isinstance(result, Sequence | np.ndarray) and len(result) == len(group.records)
    if not (is_list and all(isinstance(one, bool | np.bool_) for one in result)):
        raise UserCodeError(
            f"--group_filter {own_filter}: it must return one bool for each of the "
            f"{len(group.records)} records, in their order; return [bool(...) for record in "
            "group.records]"
        )
    return tuple(bool(one) for one in result)


def _unusable_reason(record: RecordFacts) -> RecordDrop | None:
    if not record.has_targets:
        return "no_targets"
    return "no_score" if record.score is None else None


def efficiency_shaped(group: GroupFacts) -> tuple[float | None, ...]:
    """Return scores shifted by up to 0.1 in favor of efficient records.

    Among right records fewer turns are better, among wrong ones more are (they tried harder). The
    shift is the centered rank (ties share their mean rank) times 0.2 / (n - 1), so it sums to zero
    on either side.
    """
    shaped = list(group.scores)
    for right in (True, False):
        side = [
            index
            for index, record in enumerate(group.records)
            if record.score is not None and record.is_right == right
        ]
        if len(side) < 2:
            continue
        turns = np.array([group.records[index].num_turns for index in side], dtype=np.float64)
        ranks = _mean_ranks(-turns if right else turns)
        shifts = (ranks - ranks.mean()) * _SHIFT_RANGE / (len(side) - 1)
        for index, shift in zip(side, shifts.tolist(), strict=True):
            score = group.records[index].score
            shaped[index] = None if score is None else score + shift
    return tuple(shaped)


def _surplus(indices: Sequence[int], quota: int, rng: np.random.Generator) -> list[int]:
    """Return the randomly drawn elements of `indices` that exceed the quota."""
    order = rng.permutation(len(indices))
    return [indices[position] for position in order[quota:].tolist()]


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 0, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    ranks: np.ndarray = (last - (counts - 1) / 2)[inverse.reshape(-1)]
    return ranks
