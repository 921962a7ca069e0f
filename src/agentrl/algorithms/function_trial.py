"""Tries the user's advantages, filter and learning rates on small inputs, before a run starts."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from agentrl.algorithms.advantages import ComparedRewards, compared_advantages
from agentrl.algorithms.filters import GroupFacts, RecordFacts, kept_by
from agentrl.algorithms.formula_registry import users_function
from agentrl.algorithms.tree_credit import QUESTION, TurnTree, reads_tree, tree_credits
from agentrl.config.own_function import is_reference
from agentrl.config.sections import AlgorithmSection, TrainerSection
from agentrl.errors import ConfigError, UserCodeError

_REWARDS = ([1.0, 0.0, 0.25, 1.0], [0.0, 1.0], [0.5, 0.5, 0.5], [0.0, -2.0, 3.5, 0.1, 0.1, 7.0])
_MAX_TRIED_STEPS = 1000


def try_functions(algorithm: AlgorithmSection, trainer: TrainerSection) -> None:
    """Refuse functions of the user that a run could not use; the loss is tried by `try_loss`.

    Raises:
        ConfigError: names the flag, the mistake and its remedy.
    """
    try:
        if is_reference(algorithm.advantage_estimator):
            _try_advantages(algorithm.advantage_estimator)
        if algorithm.group_filter is not None:
            _try_filter(algorithm.group_filter)
        if is_reference(trainer.lr_scheduler_type):
            _try_rates(trainer.lr_scheduler_type, trainer.max_steps)
        if trainer.on_step is not None:
            _check_one_argument(trainer.on_step, "--on_step")
    except UserCodeError as error:
        raise ConfigError(str(error)) from error


def _check_one_argument(reference: str, flag: str) -> Callable[..., Any]:
    function: Callable[..., Any] = users_function(reference, flag)
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        raise ConfigError(f"{flag} {reference}: it is async; define it with def")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise ConfigError(
            f"{flag} {reference}: it is called with one argument; see docs/own-algorithm.md"
        ) from None
    return function


def _try_advantages(reference: str) -> None:
    where = f"--advantage_estimator {reference}"
    if reads_tree(_check_one_argument(reference, "--advantage_estimator")):
        _try_tree_credits(reference)
        return
    for rewards in _REWARDS:
        values = np.array(rewards)
        found = compared_advantages(ComparedRewards(values), reference)
        if values.tolist() != rewards:
            raise ConfigError(f"{where}: it changes rewards in place; compute with a copy")
        again = compared_advantages(ComparedRewards(values), reference)
        if not np.array_equal(found, again):
            raise ConfigError(
                f"{where}: two calls with the same rewards give different advantages, so no step could "
                "be replayed; use no random numbers and keep no state"
            )
        backwards = compared_advantages(ComparedRewards(values[::-1].copy()), reference)
        if not np.allclose(found[::-1], backwards):
            raise ConfigError(
                f"{where}: it depends on the order of the rewards, which has no meaning; treat all of "
                "them alike"
            )


def _try_tree_credits(reference: str) -> None:
    where = f"--advantage_estimator {reference}"
    for scores in ([1.0, 0.0, 0.25], [0.5, 0.5, 0.5], [0.0, -2.0, 3.5]):
        found = tree_credits(_small_tree(scores), reference)
        tree = _small_tree(scores)
        again = tree_credits(tree, reference)
        if tree.scores.tolist() != scores or tree.rewards.any():
            raise ConfigError(f"{where}: it changes the tree in place; compute with copies")
        if not np.array_equal(found, again):
            raise ConfigError(
                f"{where}: two calls with the same tree give different credits, so no step could be "
                "replayed; use no random numbers and keep no state"
            )


def _small_tree(scores: list[float]) -> TurnTree:
    """Return rollouts of the turns 0 1, 0 2 and 3."""
    return TurnTree(
        before=np.array([QUESTION, 0, 0, QUESTION]),
        rewards=np.zeros(4),
        ends=np.array([1, 2, 3]),
        scores=np.array(scores),
        rounds=np.array([0, 0, 1, 0]),
        by_branch=np.array([False, False, True, False]),
    )


def _try_filter(reference: str) -> None:
    where = f"--group_filter {reference}"
    _check_one_argument(reference, "--group_filter")
    scores: tuple[float | None, ...]
    for scores in ((1.0, 0.0, None, 0.5), (0.0, 0.0), (1.0, 1.0, 1.0)):
        facts = tuple(
            RecordFacts(f"record-{number}", score, num_turns=1 + number, outcome="answered")
            for number, score in enumerate(scores)
        )
        group = GroupFacts("task", facts)
        if kept_by(reference, group) != kept_by(reference, group):
            raise ConfigError(
                f"{where}: two calls with the same group decide differently, so no step could be "
                "replayed; use no random numbers and keep no state"
            )


def _try_rates(reference: str, max_steps: int) -> None:
    where = f"--lr_scheduler_type {reference}"
    rate = _check_one_argument(reference, "--lr_scheduler_type")
    for step in {*range(1, min(max_steps, _MAX_TRIED_STEPS) + 1), max_steps}:
        value = rate(step)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and 0 <= value <= 1):
            raise ConfigError(
                f"{where}: it returned {value!r} for step {step}; return the learning rate, a number "
                "from 0 to 1"
            )
        if rate(step) != value:
            raise ConfigError(
                f"{where}: two calls for step {step} return different rates; compute the rate from the "
                "step alone, which a resumed run continues"
            )
