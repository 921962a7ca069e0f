"""Credit in trees against the exact policy gradient of a small decision process.

    python benchmarks/tree_credit.py        # writes benchmarks/results/tree_credit.json

Every group that a rule can play is enumerated with its probability, which gives the exact mean and
variance of an estimate; 200,000 groups are then drawn, and their mean is compared with the gradient in
standard errors. An estimate is divided by the mean number of trees. `bias` is the distance of its exact
mean from the gradient, over the gradient's length; `direction_bias` is the same after the mean was
scaled to fit best, which a learning rate can do. `variance_ratio` is the variance of the scaled estimate
at equal sampled turns, over that of leave-one-out on the group of chains with the nearest number of turns.
"""

import argparse
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from harness import decisions, results

from agentrl.algorithms.tree_credit import tree_credits

UNBIASED = ("leave_one_out", "vine")
KINDS = (*UNBIASED, "tree_grpo", "arpo")
CHAINS = (2, 3, 4)


@dataclass(frozen=True)
class Rule:
    """A rule of branching."""

    play: Callable[..., decisions.Group]
    does_not_look_ahead: bool
    """Whether the number of continuations of a state is independent of what followed it."""


RULES = {
    **{f"chains_{n}": Rule(partial(decisions.chains, num_rollouts=n), True) for n in CHAINS},
    "random": Rule(partial(decisions.random_rule, num_roots=2, num_branches=2), True),
    "every_state": Rule(partial(decisions.every_state, num_roots=2, num_branches=1), True),
    "undecided_states": Rule(partial(decisions.undecided_states, num_roots=2, entropy=0.62), True),
    "surprising_turns": Rule(partial(decisions.surprising_turns, num_roots=2, surprise=0.7), False),
    "most_undecided": Rule(partial(decisions.entropy_rule, num_roots=2, num_branches=2), False),
    "best_so_far": Rule(partial(decisions.value_rule, num_roots=2, num_branches=2), False),
}


@dataclass(frozen=True, eq=False)
class Played:
    """All groups of a rule."""

    chances: np.ndarray
    trees: list[decisions.PlayedTree]

    @classmethod
    def of(cls, rule: Rule) -> "Played":
        """Enumerate a rule's groups."""
        groups = list(decisions.enumerated(rule.play))
        chances = np.array([chance for chance, _ in groups])
        return cls(chances, [decisions.played_tree(group) for _, group in groups])

    @property
    def num_turns(self) -> float:
        """Mean number of sampled turns of a group."""
        return float(self.chances @ [len(tree.states) for tree in self.trees])

    def estimates(self, kind: str) -> np.ndarray:
        """Return the estimate of each group, float64 [groups, 6], over the mean number of trees."""
        num_trees = self.chances @ [len(np.unique(tree.tree.trees)) for tree in self.trees]
        found: np.ndarray = (
            np.stack([tree.gradient(tree_credits(tree.tree, kind)) for tree in self.trees])
            / num_trees
        )
        return found


def figures(played: Played, kind: str, num_groups: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return how one estimate compares with the gradient."""
    exact = decisions.exact_gradient()
    length = np.linalg.norm(exact)
    estimates = played.estimates(kind)
    mean = played.chances @ estimates
    scale = (mean @ exact) / (mean @ mean)
    counts = rng.multinomial(num_groups, played.chances / played.chances.sum())
    sampled = counts @ estimates / num_groups
    deviation = np.sqrt(counts @ (estimates - sampled) ** 2 / (num_groups - 1))
    variance = float((played.chances @ (estimates - mean) ** 2).sum() * scale**2)
    return {
        "bias": float(np.linalg.norm(mean - exact) / length),
        "direction_bias": float(np.linalg.norm(scale * mean - exact) / length),
        "largest_standard_errors": float(
            np.abs((sampled - exact) / (deviation / np.sqrt(num_groups))).max()
        ),
        "variance_times_turns": variance * played.num_turns,
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every rule and estimator."""
    found: dict[str, Any] = {}
    for name, rule in RULES.items():
        played = Played.of(rule)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        found[name] = {
            "turns": played.num_turns,
            "groups": len(played.trees),
            "does_not_look_ahead": rule.does_not_look_ahead,
            "estimators": {kind: figures(played, kind, given.groups, rng) for kind in KINDS},
        }
    chains = {
        found[name]["turns"]: found[name]["estimators"]["leave_one_out"]["variance_times_turns"]
        for name in (f"chains_{number}" for number in CHAINS)
    }
    for of_rule in found.values():
        nearest = min(chains, key=lambda turns: abs(turns - of_rule["turns"]))
        for estimator in of_rule["estimators"].values():
            variance = estimator.pop("variance_times_turns")
            estimator["variance_ratio"] = variance / chains[nearest]
    return {
        "sampled_groups": given.groups,
        "gradient": decisions.exact_gradient().tolist(),
        **found,
    }


if __name__ == "__main__":
    flags = results.parser(__doc__, "tree_credit")
    flags.add_argument("--groups", type=int, default=200_000, help="groups drawn for each figure")
    results.report(flags, measure)
