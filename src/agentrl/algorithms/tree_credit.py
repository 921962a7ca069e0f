"""Credit of single turns in a group whose rollouts leave each other at a turn.

Input: a `TurnTree`, in which a turn that several rollouts share stands once. Output: the factor of
the turn's log probability in the gradient, float64 [N].

The estimator behind `tree_leave_one_out`: the weight w_i of a rollout is the probability with which
chains would reach it through the tree, not its share of the rollouts. Every rollout from the
question has weight 1, and a state that was continued k times gives each continuation 1 / k of its
own weight. With G_i,d the reward of rollout i from turn d on, a turn u at depth d has

    W(u) = sum of w_i over the rollouts i through u
    Q(u) = sum of w_i G_i,d over them / W(u)
    credit(u) = W(u) (Q(u) - b(u))

where b(u) is computed from rollouts that share the state before u but not u itself, or an earlier
state of it, down to the question's other trees.

Bias: none, up to the factor "number of trees", if the number of continuations of a state does not
depend on what followed it: so under the rule `random`. A rule that looks at a finished rollout
before it branches continues some states because of their first outcome, and a mean over a number of
values that depends on the values is biased. Without another tree there is no baseline for the turns
before the first branch, whose credit is 0.

Variance: turns below a branch average over its continuations. Continuations of one state share its
turns, so k of them say less about these than k chains would; what is saved is their tokens.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from agentrl.algorithms.advantages import ADVANTAGES, ComparedRewards, compared_advantages
from agentrl.errors import UserCodeError

QUESTION = -1
"""In `TurnTree.before`: the turn is the first of its rollout."""


@dataclass(frozen=True, eq=False)
class TurnTree:
    """The turns of one group: N turns, passed by n rollouts that have a final reward."""

    before: np.ndarray
    """int64 [N]: the turn before each, whose number is smaller; `QUESTION` for a first turn."""
    rewards: np.ndarray
    """float64 [N]: reward of the turn itself, 0 if it has none."""
    ends: np.ndarray
    """int64 [n]: last turn of each rollout."""
    scores: np.ndarray
    """float64 [n]: final reward of each rollout, finite."""
    rounds: np.ndarray
    """int64 [N]: round of the group in which the turn was sampled, from 0."""
    by_branch: np.ndarray
    """bool [N]: a branch sampled the turn; False: a rollout from the question."""
    seat: str = ""
    """The seat that earned the rewards; empty if rollouts have one agent. Turns of other seats have
    no rewards, and their credit is not used."""

    @cached_property
    def paths(self) -> list[list[int]]:
        """The turns of each rollout, in order."""
        paths: list[list[int]] = []
        for end in self.ends.tolist():
            path = [end]
            while self.before[path[-1]] != QUESTION:
                path.append(int(self.before[path[-1]]))
            paths.append(path[::-1])
        return paths

    @cached_property
    def depths(self) -> np.ndarray:
        """Number of turns before each turn, int64 [N]."""
        depths = np.zeros(len(self.before), dtype=np.int64)
        for turn, before in enumerate(self.before.tolist()):
            depths[turn] = 0 if before == QUESTION else depths[before] + 1
        return depths

    @cached_property
    def passes(self) -> np.ndarray:
        """Whether each rollout contains each turn, bool [n, N]."""
        passes = np.zeros((len(self.ends), len(self.before)), dtype=bool)
        for row, path in zip(passes, self.paths, strict=True):
            row[path] = True
        return passes

    @cached_property
    def trees(self) -> np.ndarray:
        """First turn of each rollout, int64 [n]: rollouts with the same one are of one tree."""
        return np.array([path[0] for path in self.paths], dtype=np.int64)

    @cached_property
    def continuations(self) -> np.ndarray:
        """How often the state after each turn was continued, or ended there, int64 [N]."""
        continuations = np.zeros(len(self.before), dtype=np.int64)
        np.add.at(continuations, self.before[self.before != QUESTION], 1)
        np.add.at(continuations, self.ends, 1)
        return continuations

    @cached_property
    def weights(self) -> np.ndarray:
        """Probability of each rollout in its tree under chains, float64 [n]."""
        return np.array([1.0 / np.prod(self.continuations[path]) for path in self.paths])

    @cached_property
    def returns(self) -> np.ndarray:
        """G: reward of each rollout from each depth on, float64 [n, T]; after its end, its score."""
        earned = np.zeros((len(self.ends), max((len(path) for path in self.paths), default=0)))
        for row, path in zip(earned, self.paths, strict=True):
            row[: len(path)] = self.rewards[path]
        to_go: np.ndarray = self.scores[:, None] + earned[:, ::-1].cumsum(axis=1)[:, ::-1]
        return to_go

    @cached_property
    def stretches(self) -> list[np.ndarray]:
        """Turns between which nothing branches, int64 [length] each; every turn is in one of them."""
        last_turns: dict[int, list[int]] = {}
        stretches: list[list[int]] = []
        for turn, before in enumerate(self.before.tolist()):
            continues = (
                before != QUESTION
                and self.continuations[before] == 1
                and self.by_branch[before] == self.by_branch[turn]
                and self.rounds[before] == self.rounds[turn]
            )
            stretch = last_turns.pop(before) if continues else []
            if not continues:
                stretches.append(stretch)
            stretch.append(turn)
            last_turns[turn] = stretch
        return [np.array(stretch, dtype=np.int64) for stretch in stretches]

    def others(self, turn: int, newest_round: int) -> np.ndarray:
        """Return which rollouts share the state before a turn but not the turn, bool [n].

        Args:
            turn: the turn.
            newest_round: trees that began in a later round do not count. They were begun because of
                what earlier rounds showed, so they are no baseline for these.
        """
        before = int(self.before[turn])
        if before != QUESTION:
            eligible = self.passes[:, before]
        else:
            eligible = self.rounds[self.trees] <= newest_round
        others: np.ndarray = eligible & ~self.passes[:, turn]
        return others

    def mean_return(self, rollouts: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Return the mean return under chains from each depth on, float64 [depths].

        Args:
            rollouts: bool [n], which count; at least one.
            depths: int64.
        """
        means: np.ndarray = np.average(
            self.returns[rollouts][:, depths], axis=0, weights=self.weights[rollouts]
        )
        return means


def grown_tree(
    parents: Sequence[int | None],
    branch_turns: Sequence[int],
    num_turns: Sequence[int],
) -> list[list[int]]:
    """Return the numbers of each rollout's turns; turns that a branch copied have their original's.

    Args:
        parents: position of the rollout that each one leaves; None if it began at the question.
        branch_turns: number of turns that each one shares with its parent; 0 without a parent.
        num_turns: turns of each, with the shared ones.
    """
    numbered: dict[int, list[int]] = {}
    total = 0

    def number(rollout: int) -> list[int]:
        nonlocal total
        if rollout not in numbered:
            parent = parents[rollout]
            shared = [] if parent is None else number(parent)[: branch_turns[rollout]]
            own = num_turns[rollout] - len(shared)
            numbered[rollout] = [*shared, *range(total, total + own)]
            total += own
        return numbered[rollout]

    return [number(rollout) for rollout in range(len(parents))]


def reads_tree(function: Callable[..., Any]) -> bool:
    """Return whether an advantage function takes a `TurnTree`: its argument is annotated so."""
    parameters = list(inspect.signature(function).parameters.values())
    return bool(parameters) and parameters[0].annotation in (TurnTree, "TurnTree")


def tree_credits(tree: TurnTree, kind: str) -> np.ndarray:
    """Return the credit of every turn, float64 [N].

    An estimator that takes a tree is called with it, and `leave_one_out` is `tree_leave_one_out`.
    Others compare the rollouts, and a turn gets the mean of those that pass it.

    Raises:
        UserCodeError: the user's own failed, or returned something else.
    """
    function: Callable[..., Any] = ADVANTAGES.formula(kind)
    if not reads_tree(function):
        return tree_leave_one_out(tree) if kind == "leave_one_out" else _shared(tree, kind).mean
    credits = function(tree)
    where = f"--advantage_estimator {kind}"
    if not isinstance(credits, np.ndarray) or credits.dtype != np.float64:
        raise UserCodeError(f"{where}: it must return a NumPy array of float64")
    if credits.shape != tree.before.shape or not np.isfinite(credits).all():
        raise UserCodeError(
            f"{where}: it must return one finite value a turn, shape {tree.before.shape}, not "
            f"{credits.shape}"
        )
    return credits


_EARLIER_STATES = 1.0
"""What the baseline of earlier states counts, in continuations of the present one."""


def tree_leave_one_out(tree: TurnTree) -> np.ndarray:
    """Return W(u) (Q(u) - b(u)); see the module.

    The baseline is the mean over the k - 1 other continuations of the state before the turn, into
    which the baseline of the state before that enters as one more: a single continuation says less
    about a state than the question's other trees often do. Of chains, this is leave-one-out.
    """
    credits = np.zeros(len(tree.before))
    for stretch in tree.stretches:
        depths = tree.depths[stretch]
        baseline = _baseline(tree, int(stretch[0]), depths)
        if baseline is not None:
            through = tree.passes[:, stretch[0]]
            value = tree.mean_return(through, depths)
            credits[stretch] = tree.weights[through].sum() * (value - baseline)
    return credits


def _baseline(tree: TurnTree, turn: int, depths: np.ndarray) -> np.ndarray | None:
    path = [turn]
    while tree.before[path[-1]] != QUESTION:
        path.append(int(tree.before[path[-1]]))
    baseline: np.ndarray | None = None
    for step in reversed(path):
        others = tree.others(step, int(tree.rounds[turn]))
        if not others.any():
            continue
        mean = tree.mean_return(others, depths)
        if baseline is None:
            baseline = mean
        else:
            # All continuations of a state have the same weight.
            share = tree.weights[others].sum() / tree.weights[tree.passes[:, step]].sum()
            baseline = (share * mean + _EARLIER_STATES * baseline) / (share + _EARLIER_STATES)
    return baseline


@ADVANTAGES.register("vine")
def vine(tree: TurnTree) -> np.ndarray:
    """Return V(state after) - V(state before) for the turns of rollouts from the question.

    VinePPO (2410.01679): V is the mean return of rollouts that were started at the state for this
    purpose: its branches, without the rollout that is credited. At the question, these are the
    other trees. Turns between two states with a value are one step, as sentences are in the paper.
    Branches give values and are not trained. Unbiased if the branch points and numbers of branches
    do not depend on what followed.
    """
    credits = np.zeros(len(tree.before))
    for stretch in tree.stretches:
        first, last = int(stretch[0]), int(stretch[-1])
        before = tree.others(first, int(tree.rounds[first]))
        if tree.by_branch[first] or not before.any():
            continue
        depths = tree.depths[stretch]
        following = np.flatnonzero((tree.before == last) & ~tree.by_branch)
        after = tree.passes[:, last]
        if len(following) and (after & ~tree.passes[:, following[0]]).any():
            after = after & ~tree.passes[:, following[0]]
        credits[stretch] = tree.mean_return(after, depths) - tree.mean_return(before, depths)
    return credits


@ADVANTAGES.register("tree_grpo")
def tree_grpo(tree: TurnTree) -> np.ndarray:
    """Return the sum of the tree-based advantages of the rollouts that pass each turn.

    Tree-GRPO (2509.21240): a rollout's advantage is its `group_std` among the rollouts of its tree
    plus that among all rollouts. The paper's objective adds up whole rollouts, so it contains a
    shared turn once for each of them. Biased: by the deviations, by baselines that share turns with
    what they are compared with, and because rollouts count alike however probable they are.
    """
    across = _shared(tree, "group_std")
    within = np.zeros_like(across.advantages)
    for first in np.unique(tree.trees):
        members = tree.trees == first
        within[members] = _compared(tree.returns[members], "group_std", tree.seat)
    return _Shared(tree, across.advantages + within).sum


@ADVANTAGES.register("arpo")
def arpo(tree: TurnTree) -> np.ndarray:
    """Return the mean `group_std` advantage of the rollouts that pass each turn.

    ARPO (2507.19849), hard estimation. Biased: by the deviation, by baselines that contain the
    rollout and others that share its turns, and because a shared turn counts once while every
    continuation of it counts fully.
    """
    return _shared(tree, "group_std").mean


@dataclass(frozen=True)
class _Shared:
    """Advantages of rollouts at their turns, and what the turns get of them."""

    tree: TurnTree
    advantages: np.ndarray
    """float64 [n, T], by rollout and depth."""

    @property
    def sum(self) -> np.ndarray:
        total = np.zeros(len(self.tree.before))
        for row, path in zip(self.advantages, self.tree.paths, strict=True):
            total[path] += row[: len(path)]
        return total

    @property
    def mean(self) -> np.ndarray:
        means: np.ndarray = self.sum / self.tree.passes.sum(axis=0)
        return means


def _shared(tree: TurnTree, kind: str) -> _Shared:
    return _Shared(tree, _compared(tree.returns, kind, tree.seat))


def _compared(returns: np.ndarray, kind: str, seat: str) -> np.ndarray:
    """Return the advantages of rollouts that are compared at each depth, float64 [n, T]."""
    advantages = np.zeros_like(returns)
    if len(returns) > 1:
        for depth, column in enumerate(returns.T):
            compared = ComparedRewards(column.copy(), seat, depth)
            advantages[:, depth] = compared_advantages(compared, kind)
    return advantages
