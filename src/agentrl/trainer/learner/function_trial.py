"""Calls each function of the user once, on a small sample, before a run starts and then on every rank.

As a program, it reads flags and exits with the first mistake, so that the launcher needs no torch.
"""

import inspect
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agentrl.algorithms.advantages import ComparedRewards, compared_advantages
from agentrl.algorithms.filters import GroupFacts, RecordFacts, kept_by
from agentrl.algorithms.formula_registry import users_function
from agentrl.algorithms.losses import LossInputs, evaluated_loss
from agentrl.algorithms.tree_credit import QUESTION, TurnTree, reads_tree, tree_credits
from agentrl.config.loading import flat_values
from agentrl.config.own_function import OWN_FUNCTION_FLAGS, SOURCES, is_reference, with_sources
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.errors import ConfigError, UserCodeError

if TYPE_CHECKING:  # a program does not wait for the modules of several ranks
    from agentrl.distributed import Ranks


def try_functions(config: RootConfig) -> None:
    """Refuse, with the flag's name, a function that cannot be imported or fails on a sample."""
    values = flat_values(config)
    try:
        for flag in OWN_FUNCTION_FLAGS:
            if is_reference(values[flag]):
                mistake = _mistake(flag, values[flag], config.algorithm)
                if mistake is not None:
                    raise ConfigError(f"--{flag} {values[flag]}: {mistake}")
    except UserCodeError as error:
        raise ConfigError(str(error)) from error


def _mistake(flag: str, reference: str, algorithm: AlgorithmSection) -> str | None:
    function = users_function(reference, f"--{flag}")
    if flag == "loss_calculator":
        return _mistake_of_loss(algorithm)
    if flag == "advantage_estimator" and reads_tree(function):
        before, rounds = np.array([QUESTION, 0, 0, QUESTION]), np.array([0, 0, 1, 0])
        ends, scores = np.array([1, 2, 3]), np.array([1.0, 0.0, 0.25])
        tree = TurnTree(before, np.zeros(4), ends, scores, rounds, by_branch=rounds > 0)
        tree_credits(tree, reference)
    elif flag == "advantage_estimator":
        compared_advantages(ComparedRewards(np.array([1.0, 0.0, 0.25])), reference)
    elif flag == "group_filter":
        fact = RecordFacts("record", 1.0, num_turns=1, outcome="answered")
        kept_by(reference, GroupFacts("task", (fact, fact)))
    elif flag == "lr_scheduler_type":
        rate = function(1)
        if not (isinstance(rate, int | float) and 0 <= rate <= 1):
            return f"it returned {rate!r} for step 1; return a number from 0 to 1"
    return None


def _mistake_of_loss(algorithm: AlgorithmSection) -> str | None:
    from agentrl.trainer.learner.passes import loss_settings  # noqa: PLC0415 - takes seconds

    behavior = -torch.linspace(0.1, 2.0, 24)
    policy = (behavior + 0.1 * behavior.cos()).requires_grad_()
    turns, num_teachers = torch.arange(24) // 4, len(algorithm.teachers)
    inputs = LossInputs(
        policy_logprobs=policy,
        behavior=behavior,
        proximal=behavior if algorithm.proximal == "behavior" else policy.detach(),
        reference=behavior - 0.1 if algorithm.kl_coefficient else None,
        teacher_logprobs=behavior[:, None].repeat(1, num_teachers) if num_teachers else None,
        entropies=-behavior,
        advantages=1.0 - turns % 3,
        staleness=torch.zeros(24, dtype=torch.int64),
        turns=turns,
        records=turns // 2,
        settings=loss_settings(algorithm),
    )
    losses, metrics = evaluated_loss(inputs, algorithm.loss_args or {})
    gradient = None
    if losses.loss.requires_grad:
        (gradient,) = torch.autograd.grad(losses.loss.sum(), policy, allow_unused=True)
    if gradient is None or not gradient.any():
        return "no gradient reaches policy_logprobs; compute the loss from them without detach()"
    for name, values in {"loss": losses.loss, "gradient": gradient, **metrics}.items():
        if not values.isfinite().all():
            return f"its {name} is not finite; bound logarithms, and avoid 0 / 0 and sqrt(0)"
    return None


def problem_of_functions(config: RootConfig, ranks: "Ranks") -> str | None:
    """Return the first mistake on any rank, whose file may be another one (collective)."""
    problem, sources = None, {}
    try:
        try_functions(config)
        sources = with_sources(flat_values(config)).get(SOURCES, {})
    except ConfigError as error:
        problem = str(error)
    found = ranks.gather_all((platform.node(), problem, sources))
    _, of_main, expected = found[0]
    for rank, (host, other, digests) in enumerate(found if of_main is None else []):
        if other is not None:
            return f"rank {rank} ({host}): {other}"
        for flag in (flag for flag in digests if digests[flag] != expected[flag]):
            return (
                f"rank {rank} ({host}): --{flag} {flat_values(config)[flag]}: its source is not that "
                "of rank 0; copy the file to all machines"
            )
    return of_main


def reference_of(loss: str | Callable[..., Any]) -> str:
    """Return the name of a loss, by which every rank and `agentrl replay` find it."""
    if isinstance(loss, str):
        return loss
    path, name = inspect.getsourcefile(loss), loss.__qualname__
    if path is None or not name.isidentifier() or not Path(path).is_file():
        raise ConfigError(
            f"forward_backward: the loss {loss.__name__} is not defined at the top of a file, from which the "
            "other ranks and `agentrl replay` could import it; define it with def in a .py file"
        )
    return f"{path}:{name}"


if __name__ == "__main__":
    try:
        try_functions(RootConfig.model_validate_json(sys.stdin.read()))
    except ConfigError as error:
        sys.exit(str(error))
