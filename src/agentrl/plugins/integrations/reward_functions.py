"""Finds, checks and references reward functions, so that other processes can call them."""

import asyncio
import inspect
import logging
import math
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from agentrl.config.user_code import users_place
from agentrl.datasets.question import own_columns
from agentrl.errors import ConfigError
from agentrl.plugins.integrations.agent_worker.references import (
    described,
    functions_of,
    load_object,
    reference_to,
    required_parameters,
    resolve_reference,
)
from agentrl.plugins.integrations.question_rows import Row, read_questions, reward_inputs
from agentrl.rewards.rollout_view import answering_at_once
from agentrl.schema import GroundTruth

log = logging.getLogger(__name__)

_TRIAL_SECONDS = 20.0
Form = Literal["aworld", "scorer", "rollout"]
AWORLD_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True)
class RewardFunction:
    """A reward function by reference.

    Attributes:
        reference: `file.py:function` or `package.module:function`.
        form: `aworld`: called with `data_source`, `solution_str`, `ground_truth`, `extra_info`;
            `scorer`: with the answer and the `GroundTruth`; `rollout`: also with the `Rollout`.
    """

    reference: str
    form: Form

    @property
    def name(self) -> str:
        """The function's name."""
        return self.reference.rpartition(":")[2]


def check_reward_function(
    reward: Any, folder: Path | None = None, questions: Path | None = None
) -> RewardFunction:
    """Return the user's reward function."""
    if isinstance(reward, str | Path):
        text = str(reward)
        reference = resolve_reference(
            f"{text}:{_only_function(Path(text))}" if text.endswith(".py") else text,
            "reward_func",
        )
        function = load_object(reference, "reward_func")
    elif callable(reward):
        reference, function = reference_to(reward, "reward_func", folder), reward
    else:
        raise ConfigError(
            f"reward_func: {described(reward)} is not callable; pass a function, or "
            "file.py:function"
        )
    reward_function = RewardFunction(reference, _form(function, reference.rpartition(":")[2]))
    if questions is not None:
        _try(function, reward_function, next(read_questions(questions)))
    return reward_function


def _try(function: Callable[..., Any], reward: RewardFunction, question: Row) -> None:
    """Call the function with a question and its own reference answer, if it has one."""
    truth = GroundTruth(
        query=str(question.get("query", "")),
        answer=question.get("answer"),
        columns=own_columns(question),
    )
    if truth.answer is None:
        return
    call = partial(function, str(truth), truth)
    if reward.form == "rollout":
        call = partial(call, answering_at_once(truth))
    if reward.form == "aworld":
        text = f"<answer>{truth}</answer>"
        call = partial(function, **reward_inputs(question), solution_str=text)
    outcome: list[Any] = []

    async def reward_of_call() -> Any:
        result = call()
        return await result if inspect.isawaitable(result) else result

    def run() -> None:
        try:
            outcome.append(asyncio.run(reward_of_call()))
        except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
            outcome.append(error)

    # In a thread, because a notebook's own thread already has an event loop. It is a daemon thread,
    # because the call may never end.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_TRIAL_SECONDS)
    where = f"reward_func: {reward.name}"
    result = outcome[0] if outcome else TimeoutError(f"no result within {_TRIAL_SECONDS:g} s")
    if isinstance(result, ConnectionError | TimeoutError):
        log.warning("%s could not be tested (%s: %s)", where, type(result).__name__, result)
    elif isinstance(result, Exception):
        place = users_place(traceback.extract_tb(result.__traceback__))
        raise ConfigError(
            f"{where} raised {type(result).__name__}: {result} ({place}) "
            "on the first question with its reference answer; a reward function must return a "
            "number for any text"
        ) from result
    elif not _is_finite(result):
        returned = result if isinstance(result, float) else described(result)
        raise ConfigError(f"{where} returned {returned}; it must return a finite number")


def _is_finite(result: Any) -> bool:
    try:
        return math.isfinite(result)
    except (TypeError, ValueError, OverflowError):
        return False


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


def _form(function: Callable[..., Any], name: str) -> Form:
    if not callable(function):
        raise ConfigError(f"reward_func: {name} is {described(function)}, not a function")
    names, takes_any = required_parameters(function)
    if tuple(names) == AWORLD_PARAMETERS:
        return "aworld"
    if len(names) == 2 and not takes_any:
        return "scorer"
    if len(names) == 3 and names[2] == "rollout":
        return "rollout"
    raise ConfigError(
        f"reward_func: {name}{inspect.signature(function)}: expected "
        "(data_source, solution_str, ground_truth, extra_info=None), (answer, truth) or (answer, "
        "truth, rollout)"
    )
