"""Rules that choose the turn at which a rollout leaves another one of its group (`--branch_rule`).

Input: the ended rollouts of a group's earlier rounds, and the position of the slot that asks.
Output: a place, or the reason for starting at the question. A rule depends on nothing else, so
another process, or a second attempt, would choose the same place.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from agentrl.algorithms.formula_registry import FormulaRegistry
from agentrl.config.own_function import is_reference
from agentrl.errors import UserCodeError
from agentrl.schema import BranchPoint, DispatchedSamplingTask, Record, Score

FIRST_TOKENS = 16
"""Tokens of a reply whose surprise `entropy` reads: enough for an intention, too few for its details."""


class BranchPlace(NamedTuple):
    """A turn of a rollout, before which another one may leave it."""

    record_id: str
    turn: int


@dataclass(frozen=True, kw_only=True)
class BranchingGroup:
    """What a rule sees of a group.

    Attributes:
        records: the ended Records of earlier rounds, by `traj_id`.
        turns: their turns, by Record id.
        round: the round of the slot that asks.
        position: the slot's position in its round, from 0: slots of a round ask independently, so
            a rule that ranks places gives each slot its own rank.
        depth: `branch_depth`.
        seed: differs between slots, and between runs.
        round_seed: the same for all slots of a round.
    """

    records: tuple[Record, ...]
    turns: Mapping[str, Sequence[DispatchedSamplingTask]]
    round: int
    position: int
    depth: int
    seed: str
    round_seed: str

    def can_leave(self, place: BranchPlace) -> bool:
        """Return whether a rollout may be sampled again from a turn.

        Not from one that failed, whose turns nobody trains; not from its first turn, which is a
        rollout of its own; and not from a call of another model.
        """
        turns = self.turns.get(place.record_id, ())
        record = next((one for one in self.records if one.id == place.record_id), None)
        return (
            record is not None
            and record.status == "scored"
            and 1 <= place.turn < len(turns)
            and turns[place.turn].trainable
        )

    def places(self) -> list[BranchPlace]:
        """Return all turns that can be left, each once: a branch has copies of its parent's turns."""
        return [
            place
            for record in self.records
            for turn in range(_first_own(record), len(self.turns.get(record.id, ())))
            if self.can_leave(place := BranchPlace(record.id, turn))
        ]

    def leaves_below(self, place: BranchPlace) -> list[Record]:
        """Return the scored Records that went through the state before a turn."""
        below = {place.record_id}
        # In order of rounds: a branch follows the Record that it leaves.
        for record in sorted(self.records, key=lambda one: (one.round, one.traj_id)):
            point = record.branch
            if point is not None and point.record_id in below and point.turn >= place.turn:
                below.add(record.id)
        return [one for one in self.records if one.id in below and one.score is not None]


BranchRule = Callable[[BranchingGroup], Any]
_RULES: FormulaRegistry[BranchRule] = FormulaRegistry("branch_rule", "rule")


def choose_branch(rule: str, group: BranchingGroup) -> tuple[BranchPoint | None, str]:
    """Return where a slot's rollout leaves another one, and otherwise why it does not.

    Args:
        rule: the name of a rule, or the reference of a user's: a function that takes the group and
            returns `(record_id, turn)`, or None for a rollout from the question.
        group: the group.

    Raises:
        UserCodeError: the user's rule failed, or returned something else.
    """
    found = _RULES.formula(rule)(group)
    if is_reference(rule):
        found = _checked(rule, found, group)
    if isinstance(found, str):
        return None, f"{rule}: {found}"
    place, reason = found
    parent = next(one for one in group.records if one.id == place.record_id)
    point = BranchPoint(
        record_id=place.record_id,
        attempt=parent.attempt,
        turn=place.turn,
        rule=rule,
        reason=reason,
    )
    return point, ""


def _checked(rule: str, found: Any, group: BranchingGroup) -> str | tuple[BranchPlace, str]:
    """Return what the user's rule chose, in the form of a built-in one."""
    if found is None:
        return "it chose the question"
    is_pair = isinstance(found, tuple) and [*map(type, found)] == [str, int]
    if not is_pair or not group.can_leave(BranchPlace(*found)):
        raise UserCodeError(
            f"--branch_rule {rule}: it returned {found!r}; return (record id, turn) of a scored "
            "record and a turn from 1 that it has, such as one of group.places(), or None"
        )
    return BranchPlace(*found), ""


@_RULES.register("random")
def _random(group: BranchingGroup) -> str | tuple[BranchPlace, str]:
    """Choose a root and a depth uniformly, before looking at either.

    Neither depends on what was sampled: a turn that the root did not reach means a rollout from the
    question, not another choice, which would prefer long rollouts.
    """
    draw = random.Random(group.seed)
    root = draw.choice([one for one in group.records if one.round == 0])
    place = BranchPlace(root.id, draw.randint(1, group.depth))
    if not group.can_leave(place):
        return f"{root.id} has no turn {place.turn} to leave"
    return place, f"depth {place.turn} of {group.depth}"


@_RULES.register("entropy")
def _entropy(group: BranchingGroup) -> str | tuple[BranchPlace, str]:
    """Choose the turns whose first tokens surprise most, compared with the rollout's first turn."""

    def jump(place: BranchPlace) -> float:
        turns = group.turns[place.record_id]
        return _surprise(turns[place.turn]) - _surprise(turns[0])

    return _ranked(group, jump, "first tokens {:+.3f} nats against the first turn's")


@_RULES.register("value")
def _value(group: BranchingGroup) -> str | tuple[BranchPlace, str]:
    """Choose the turns whose worth the scores below them leave most uncertain."""
    spread = float(np.var([score.value for score in _scores(group.records)] or [0.0]))

    def doubt(place: BranchPlace) -> float:
        values = [score.value for score in _scores(group.leaves_below(place))]
        # The variance of their mean, with one more score of the group's spread: a single leaf is
        # half as uncertain as the group, many that agree are nearly certain, disagreement counts.
        squares = float(np.var(values)) * len(values)
        return (squares + spread) / (len(values) * (len(values) + 1))

    return _ranked(group, doubt, "variance {:.4f} of its worth")


def _ranked(
    group: BranchingGroup, worth: Callable[[BranchPlace], float], reason: str
) -> str | tuple[BranchPlace, str]:
    """Return the place whose rank is the slot's position; equal ones in random order."""
    places = group.places()
    if not places:
        return "no rollout has a second turn"
    random.Random(group.round_seed).shuffle(places)
    values = {place: worth(place) for place in places}
    places.sort(key=lambda place: -values[place])
    place = places[group.position % len(places)]
    return place, reason.format(values[place])


def _first_own(record: Record) -> int:
    """Return the first turn before which a Record is in a state that is its own."""
    return 1 if record.branch is None else record.branch.turn + 1


def _surprise(turn: DispatchedSamplingTask) -> float:
    first = turn.output_logprobs[:FIRST_TOKENS]
    return -float(np.mean(first)) if len(first) else 0.0


def _scores(records: Sequence[Record]) -> Iterator[Score]:
    return (one.score for one in records if one.score is not None)
