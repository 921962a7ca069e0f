"""Reward functions: found, checked and named by reference, so that other processes call them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import ConfigError
from agentrl.integrations.agent_worker.references import (
    functions_of,
    load_object,
    reference_to,
    required_parameters,
    resolve_reference,
)

AWORLD_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True)
class RewardFunction:
    """A reward function by reference.

    Attributes:
        reference: `file.py:function` or `package.module:function`.
        form: `aworld`: called with `data_source`, `solution_str`, `ground_truth`, `extra_info`;
            `scorer`: with the answer and the `GroundTruth`.
    """

    reference: str
    form: Literal["aworld", "scorer"]

    @property
    def name(self) -> str:
        """The function's name."""
        return self.reference.rpartition(":")[2]


def check_reward_function(reward: Any) -> RewardFunction:
    """Return the reward function that the user named.

    Args:
        reward: a function, `file.py:function`, or the path of a file: that names its only
            function, or the one that has the file's name.

    Raises:
        ConfigError: it cannot be found, or does not take the right arguments.
    """
    if isinstance(reward, str | Path):
        text = str(reward)
        reference = resolve_reference(
            f"{text}:{_only_function(Path(text))}" if text.endswith(".py") else text,
            "reward_func",
        )
        function = load_object(reference, "reward_func")
    elif callable(reward):
        reference, function = reference_to(reward, "reward_func"), reward
    else:
        raise ConfigError(
            f"reward_func: a {type(reward).__name__} cannot be called; pass a function, or "
            "file.py:function"
        )
    return RewardFunction(reference, _form(function, reference.rpartition(":")[2]))


def _only_function(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"reward_func: {path}: no such file")
    names = functions_of(path, "reward_func")
    if path.stem in names:
        return path.stem
    if len(names) == 1:
        return names[0]
    raise ConfigError(
        f"reward_func: {path} has {len(names)} functions"
        f"{' (' + ', '.join(names) + ')' if names else ''}; write {path}:function"
    )


def _form(function: Callable[..., Any], name: str) -> Literal["aworld", "scorer"]:
    if not callable(function):
        raise ConfigError(f"reward_func: {name} is a {type(function).__name__}, not a function")
    names, takes_any = required_parameters(function)
    if tuple(names) == AWORLD_PARAMETERS:
        return "aworld"
    if len(names) == 2 and not takes_any:
        return "scorer"
    raise ConfigError(
        f"reward_func: {name}{inspect.signature(function)}: expected "
        "(data_source, solution_str, ground_truth, extra_info=None) or (answer, truth)"
    )
