"""The tree of a group's turns, from the branch points of its records.

Input: the records of a group. Output: a number for every turn, the same for a turn and its copies in
the records that left its rollout later, the `TurnTree`s of the group's seats, and what each turn
is worth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.algorithms.tree_credit import QUESTION, TurnTree, grown_tree, tree_credits
from agentrl.data.seat_stints import SeatStint
from agentrl.schema import DBRecordData, TurnWorth


@dataclass(frozen=True, eq=False)
class RecordTree:
    """The N turns of a group, each counted once."""

    turns: tuple[tuple[int, ...], ...]
    """Numbers of each record's turns, in order."""
    num_inherited: tuple[int, ...]
    """How many of them each record copied from the one it left."""
    before: np.ndarray
    rounds: np.ndarray
    by_branch: np.ndarray
    """As in `TurnTree`, [N]."""


def record_tree(records: Sequence[DBRecordData]) -> RecordTree:
    """Return the tree of a group's records.

    A branch whose parent is not among the records, or only with another attempt, is a rollout of its
    own: nothing else trains the turns that it copied.
    """
    positions = {
        (record.record_id, record.attempt): position for position, record in enumerate(records)
    }
    parents: list[int | None] = []
    inherited: list[int] = []
    for record in records:
        branch = record.branch
        parent = None if branch is None else positions.get((branch.record_id, branch.attempt))
        if branch is None or parent is None or len(records[parent].turns) < branch.turn:
            parents.append(None)
            inherited.append(0)
        else:
            parents.append(parent)
            inherited.append(min(branch.turn, len(record.turns)))
    numbers = grown_tree(parents, inherited, [len(record.turns) for record in records])
    size = sum(len(path) for path in numbers) - sum(inherited)
    before, rounds = np.full(size, QUESTION, dtype=np.int64), np.zeros(size, dtype=np.int64)
    by_branch = np.zeros(size, dtype=bool)
    for record, path, shared in zip(records, numbers, inherited, strict=True):
        before[path[1:]] = path[:-1]
        rounds[path[shared:]] = record.round
        by_branch[path[shared:]] = shared > 0
    return RecordTree(
        tuple(tuple(path) for path in numbers), tuple(inherited), before, rounds, by_branch
    )


def chain_weights(tree: RecordTree, scores: Sequence[float | None]) -> list[float]:
    """Return the probability of each record in its tree under chains, as in `TurnTree.weights`.

    A record without a score or without turns leaves the others' as they are. Of chains, all are 1.
    """
    weights = np.ones(len(scores))
    scored = _scored(tree, scores)
    if scored and any(tree.num_inherited):
        part = _rewarded_part(tree, scored, np.zeros(len(tree.before)), seat="")[1]
        weights[list(scored)] = part.weights
    return [float(weight) for weight in weights]


def seat_tree_credits(
    tree: RecordTree,
    stints: Sequence[tuple[int, SeatStint, float | None]],
    kind: str,
) -> list[np.ndarray]:
    """Return the credits of the turns of each stint, float64 [T_i] each; NaN without a reward.

    A stint is compared with the stints of its seat that have the same number in their records.
    """
    credits = [np.full(len(stint.turns), np.nan) for _, stint, _ in stints]
    compared: dict[tuple[str, int], list[int]] = {}
    for number, (_, stint, _) in enumerate(stints):
        seat = stint.turns[0].seat if stint.turns else None
        key = (stint.seat, 0 if seat is None else seat.stint)
        compared.setdefault(key, []).append(number)
    for (name, _), members in compared.items():
        of_seat = {stints[member][0]: stints[member][1:] for member in members}
        by_turn = _credit_by_turn(tree, of_seat, name, kind)
        for member in members:
            position, stint, final = stints[member]
            if final is not None:
                path = tree.turns[position]
                credits[member][:] = [by_turn[path[turn.index]] for turn in stint.turns]
    return credits


def _credit_by_turn(
    tree: RecordTree,
    stints: Mapping[int, tuple[SeatStint, float | None]],
    seat: str,
    kind: str,
) -> Mapping[int, float]:
    """Return the credit of every turn that a record with a final reward contains, by its number."""
    rewarded = {position: final for position, (_, final) in stints.items() if final is not None}
    rewards = np.zeros(len(tree.before))
    # Last to first: a shared turn has the reward that its own record stored, not that of a copy.
    for position, (stint, final) in sorted(stints.items(), reverse=True):
        if final is not None:
            for turn, reward in zip(stint.turns, stint.step_rewards, strict=True):
                rewards[tree.turns[position][turn.index]] = reward or 0.0
    reached, rewarded_tree = _rewarded_part(tree, rewarded, rewards, seat)
    if not reached:
        return {}
    return dict(zip(reached, tree_credits(rewarded_tree, kind).tolist(), strict=True))


def turn_worths(tree: RecordTree, scores: Sequence[float | None]) -> dict[int, TurnWorth]:
    """Return what every turn of a scored record is worth, by the turn's number."""
    scored = _scored(tree, scores)
    reached, part = _rewarded_part(tree, scored, np.zeros(len(tree.before)), seat="")
    if not reached:
        return {}
    weights = part.passes * part.weights[:, None]
    after = part.scores @ weights / weights.sum(axis=0)
    question = np.average(part.scores, weights=part.weights)
    is_first = part.before == QUESTION
    change = after - np.where(is_first, question, after[part.before])
    leaves = part.passes.sum(axis=0)
    is_decision = (leaves > 1) | (~is_first & (part.continuations[part.before] > 1))
    columns = (after.tolist(), change.tolist(), leaves.tolist(), is_decision.tolist())
    return {
        number: TurnWorth(after=worth, change=moved, num_leaves=num, is_decision=decides)
        for number, worth, moved, num, decides in zip(reached, *columns, strict=True)
    }


def worths_of_branches(
    records: Sequence[DBRecordData], tree: RecordTree, scores: Sequence[float | None]
) -> dict[str, TurnWorth]:
    """Return what the turns of a group that branches are worth, by the turn's id; none of chains."""
    if not any(tree.num_inherited):
        return {}
    by_number = turn_worths(tree, scores)
    return {
        turn.id: by_number[number]
        for record, path in zip(records, tree.turns, strict=True)
        for turn, number in zip(record.turns, path, strict=True)
        if number in by_number
    }


def _scored(tree: RecordTree, scores: Sequence[float | None]) -> dict[int, float]:
    """Return the scores of the records that have one and turns, by position."""
    return {
        position: score
        for position, (path, score) in enumerate(zip(tree.turns, scores, strict=True))
        if path and score is not None
    }


def _rewarded_part(
    tree: RecordTree, finals: Mapping[int, float], rewards: np.ndarray, seat: str
) -> tuple[list[int], TurnTree]:
    """Return the numbers of the turns that some records contain, and the tree of these."""
    paths = [tree.turns[position] for position in finals]
    reached = sorted({number for path in paths for number in path})
    numbers = np.full(len(tree.before) + 1, QUESTION, dtype=np.int64)
    numbers[reached] = np.arange(len(reached))
    part = TurnTree(
        before=numbers[tree.before[reached]],
        rewards=rewards[reached],
        ends=numbers[[path[-1] for path in paths]],
        scores=np.array(list(finals.values())),
        rounds=tree.rounds[reached],
        by_branch=tree.by_branch[reached],
        seat=seat,
    )
    return reached, part
