"""A small decision process, whose groups of rollouts and policy gradient can be enumerated.

Three decisions between two actions; one history ends after two of them. A state is the history of
actions, the policy has one parameter a state: the logit of action 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.algorithms.tree_credit import QUESTION, TurnTree, grown_tree

History = tuple[int, ...]
Choose = Callable[[Sequence[float]], int]
"""Draws an index with the given probabilities."""

STATES: tuple[History, ...] = ((), (0,), (1,), (0, 0), (0, 1), (1, 0))
RIGHT = np.array([0.35, 0.7, 0.45, 0.2, 0.6, 0.8])
"""Probability of action 1 in each state."""
REWARDS: dict[History, float] = {
    (0, 0, 0): 0.0,
    (0, 0, 1): 1.0,
    (0, 1, 0): 0.2,
    (0, 1, 1): 0.6,
    (1, 0, 0): 0.0,
    (1, 0, 1): 1.0,
    (1, 1): 0.1,
}
LAST_BRANCH = 2
"""Last turn at which a rollout may be left."""


def probability(history: History) -> float:
    """Return the probability that a rollout begins with a history."""
    found = 1.0
    for turn, action in enumerate(history):
        right = float(RIGHT[STATES.index(history[:turn])])
        found *= right if action else 1.0 - right
    return found


def exact_gradient() -> np.ndarray:
    """Return the gradient of the expected reward with respect to the parameters, float64 [6]."""
    gradient = np.zeros(len(STATES))
    for history, reward in REWARDS.items():
        for turn, action in enumerate(history):
            state = STATES.index(history[:turn])
            gradient[state] += probability(history) * reward * (action - RIGHT[state])
    return gradient


def finished(choose: Choose, begun: History = ()) -> History:
    """Return a history that the policy continues to its end."""
    while begun not in REWARDS:
        right = float(RIGHT[STATES.index(begun)])
        begun = (*begun, choose((1.0 - right, right)))
    return begun


@dataclass(frozen=True)
class Rollout:
    """One rollout of a group."""

    history: History
    parent: int | None = None
    turn: int = 0
    """First turn that is its own."""
    round: int = 0


Group = tuple[Rollout, ...]
Play = Callable[[Choose], Group]
"""Plays one group."""


def branch(choose: Choose, group: Group, parent: int, turn: int, round_number: int) -> Rollout:
    """Return a rollout that leaves another; a fresh one if that had ended before."""
    history = group[parent].history
    if len(history) <= turn:
        return Rollout(finished(choose), round=round_number)
    return Rollout(finished(choose, history[:turn]), parent, turn, round_number)


def chains(choose: Choose, num_rollouts: int) -> Group:
    """Play rollouts from the question."""
    return tuple(Rollout(finished(choose)) for _ in range(num_rollouts))


def random_rule(choose: Choose, num_roots: int, num_branches: int) -> Group:
    """Branch at a root and a turn that are drawn uniformly."""
    group = chains(choose, num_roots)
    for number in range(num_branches):
        place = choose([1.0 / (num_roots * LAST_BRANCH)] * (num_roots * LAST_BRANCH))
        root, turn = place % num_roots, 1 + place // num_roots
        group = (*group, branch(choose, group, root, turn, 1 + number))
    return group


def every_state(choose: Choose, num_roots: int, num_branches: int) -> Group:
    """Branch at every state of every root: the `value` rule with a budget for all of them."""
    group = chains(choose, num_roots)
    places = [
        (root, turn)
        for root, rollout in enumerate(group)
        for turn in range(1, len(rollout.history))
        for _ in range(num_branches)
    ]
    return (*group, *(branch(choose, group, root, turn, 1) for root, turn in places))


def undecided_states(choose: Choose, num_roots: int, entropy: float) -> Group:
    """Branch at every state of the roots in which the policy's entropy exceeds a bound."""
    return _wherever(choose, num_roots, lambda state, _action: state_entropy(state) > entropy)


def surprising_turns(choose: Choose, num_roots: int, surprise: float) -> Group:
    """Branch before every turn of the roots whose own -log p exceeds a bound."""

    def is_surprising(state: History, action: int) -> bool:
        return bool(-np.log(probability((*state, action)) / probability(state)) > surprise)

    return _wherever(choose, num_roots, is_surprising)


def _wherever(choose: Choose, num_roots: int, is_left: Callable[[History, int], bool]) -> Group:
    group = chains(choose, num_roots)
    places = [
        (root, turn)
        for root, rollout in enumerate(group)
        for turn in range(1, len(rollout.history))
        if is_left(rollout.history[:turn], rollout.history[turn])
    ]
    return (*group, *(branch(choose, group, root, turn, 1) for root, turn in places))


def state_entropy(state: History) -> float:
    """Return the entropy of the policy in a state, in nats."""
    right = RIGHT[STATES.index(state)]
    return float(-right * np.log(right) - (1.0 - right) * np.log(1.0 - right))


def entropy_rule(choose: Choose, num_roots: int, num_branches: int) -> Group:
    """Branch at those states of the roots in which the policy's entropy is highest."""
    group = chains(choose, num_roots)

    def decided(place: tuple[int, int]) -> float:
        return -state_entropy(group[place[0]].history[: place[1]])

    return _at_first(choose, group, decided, num_branches)


def value_rule(choose: Choose, num_roots: int, num_branches: int) -> Group:
    """Branch where a rollout did best: a rule that looks at what followed."""
    group = chains(choose, num_roots)
    return _at_first(
        choose,
        group,
        lambda place: -REWARDS[group[place[0]].history] - place[1] / 10,
        num_branches,
    )


def _at_first(
    choose: Choose, group: Group, order: Callable[[tuple[int, int]], float], num_branches: int
) -> Group:
    places = [
        (root, turn)
        for root, rollout in enumerate(group)
        for turn in range(1, len(rollout.history))
    ]
    chosen = sorted(places, key=order)[:num_branches]
    return (*group, *(branch(choose, group, root, turn, 1) for root, turn in chosen))


def enumerated(play: Play) -> Iterator[tuple[float, Group]]:
    """Yield every group that can be played, with its probability."""
    prefixes: list[tuple[int, ...]] = [()]
    while prefixes:
        prefix = prefixes.pop()
        made: list[int] = []
        chance = 1.0

        def choose(probabilities: Sequence[float]) -> int:
            nonlocal chance
            if len(made) < len(prefix):  # noqa: B023 - called within the round
                choice = prefix[len(made)]  # noqa: B023
            else:
                choice = 0
                prefixes.extend((*made, other) for other in range(1, len(probabilities)))  # noqa: B023
            made.append(choice)  # noqa: B023
            chance *= probabilities[choice]
            return choice

        group = play(choose)
        yield chance, group


@dataclass(frozen=True, eq=False)
class PlayedTree:
    """The tree of a group, with the state and action of each turn."""

    tree: TurnTree
    states: np.ndarray
    """int64 [N], positions in `STATES`."""
    actions: np.ndarray
    """int64 [N]."""

    def gradient(self, credits: np.ndarray) -> np.ndarray:
        """Return the sum of credit times gradient of the log probability, float64 [6]."""
        gradient = np.zeros(len(STATES))
        np.add.at(gradient, self.states, credits * (self.actions - RIGHT[self.states]))
        return gradient


def played_tree(group: Group) -> PlayedTree:
    """Return the tree of a group."""
    turns = grown_tree(
        [rollout.parent for rollout in group],
        [rollout.turn for rollout in group],
        [len(rollout.history) for rollout in group],
    )
    size = 1 + max(path[-1] for path in turns)
    before, states, actions, rounds = (np.zeros(size, dtype=np.int64) for _ in range(4))
    by_branch = np.zeros(size, dtype=bool)
    for rollout, path in zip(group, turns, strict=True):
        before[path] = [QUESTION, *path[:-1]]
        states[path] = [STATES.index(rollout.history[:turn]) for turn in range(len(path))]
        actions[path] = rollout.history
        rounds[path[rollout.turn :]] = rollout.round
        by_branch[path[rollout.turn :]] = rollout.parent is not None
    tree = TurnTree(
        before=before,
        rewards=np.zeros(size),
        ends=np.array([path[-1] for path in turns]),
        scores=np.array([REWARDS[rollout.history] for rollout in group]),
        rounds=rounds,
        by_branch=by_branch,
    )
    return PlayedTree(tree, states, actions)
