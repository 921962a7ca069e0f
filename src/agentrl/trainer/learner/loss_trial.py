"""Tries the user's loss on a small random step, before a run starts.

Input: the flags of the algorithm. Output: nothing, or the first mistake in one line. As a program, it
answers a `RequestProcess`, so that the launcher needs no torch.
"""

import asyncio
import io
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import fields, replace
from typing import Any

import torch

from agentrl.algorithms.losses import EvaluatedLoss, LossInputs, evaluated_loss
from agentrl.config.own_function import is_reference
from agentrl.config.sections import AlgorithmSection
from agentrl.errors import AgentRLError, ConfigError, UserCodeError
from agentrl.runtime.printable import one_line
from agentrl.runtime.processes.request_server import Answer, RequestServer
from agentrl.runtime.telemetry.loop_watch import LoopWatch
from agentrl.trainer.learner.passes import loss_settings

_TURNS_PER_RECORD = (2, 3, 1)
_TOKENS_PER_TURN = (5, 3, 7, 2, 4, 3)
_MAX_SECONDS = 1.0
"""Longest time of one call. A loss of a few tokens takes less than a millisecond."""
_TOLERANCE = 1e-5
_MAX_PROBLEM_CHARS = 500


def try_loss(algorithm: AlgorithmSection) -> None:
    """Refuse a user's loss that a run could not train with; does nothing for built-in ones.

    Raises:
        ConfigError: names the flag, the mistake and its remedy.
    """
    if not is_reference(algorithm.loss_calculator):
        return
    where = f"--loss_calculator {algorithm.loss_calculator}"
    arguments = algorithm.loss_args or {}

    def compute(inputs: LossInputs) -> EvaluatedLoss:
        return evaluated_loss(inputs, arguments)

    random_state = torch.get_rng_state()
    try:
        for check in (_check_one_call, _check_repeatable, _check_independent, _check_empty):
            problem = check(compute, _random_step(algorithm))
            if problem is not None:
                raise ConfigError(f"{where}: {problem}")
    except UserCodeError as error:
        raise ConfigError(str(error)) from error
    finally:
        torch.set_rng_state(random_state)


_Compute = Callable[[LossInputs], EvaluatedLoss]


def _random_step(algorithm: AlgorithmSection) -> LossInputs:
    random = torch.Generator().manual_seed(0)
    turns = torch.repeat_interleave(torch.tensor(_TOKENS_PER_TURN))
    records = torch.repeat_interleave(torch.tensor(_TURNS_PER_RECORD))[turns]
    count = len(turns)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=random)

    behavior = -0.05 - 2.0 * torch.rand(count, generator=random)
    policy = behavior + noise(0.1)
    advantages = torch.tensor([1.0, -0.5, 0.8, -1.0, 0.4, -0.7])[turns]
    return LossInputs(
        policy_logprobs=policy.requires_grad_(),
        behavior=behavior,
        proximal=behavior.clone() if algorithm.proximal == "behavior" else policy.detach().clone(),
        reference=behavior + noise(0.1) if algorithm.kl_coefficient else None,
        teacher_logprobs=_teachers(behavior, random, len(algorithm.teachers)),
        entropies=torch.rand(count, generator=random),
        advantages=advantages,
        staleness=torch.arange(count) % (min(algorithm.max_staleness, 3) + 1),
        turns=turns,
        records=records,
        settings=loss_settings(algorithm),
    )


def _teachers(
    behavior: torch.Tensor, random: torch.Generator, num_teachers: int
) -> torch.Tensor | None:
    if not num_teachers:
        return None
    noise = torch.randn(len(behavior), num_teachers, generator=random)
    return behavior[:, None] + 0.1 * noise


def _part(inputs: LossInputs, numbers: list[int]) -> tuple[torch.Tensor, LossInputs]:
    """Return whole turns as a micro-batch of their own, and the places of its tokens."""
    rows = torch.cat([(inputs.turns == number).nonzero()[:, 0] for number in numbers or [-1]])
    values: dict[str, Any] = {
        field.name: value[rows].detach()
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), torch.Tensor)
    }
    values["turns"] = torch.unique(values["turns"], return_inverse=True)[1]
    values["policy_logprobs"].requires_grad_()
    return rows, replace(inputs, **values)


def _gradient(inputs: LossInputs, result: EvaluatedLoss) -> torch.Tensor | None:
    if not result.losses.loss.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(
        result.losses.loss.sum(), inputs.policy_logprobs, allow_unused=True
    )
    return gradient


def _check_one_call(compute: _Compute, inputs: LossInputs) -> str | None:
    """Return a mistake that one call shows."""
    before = {
        field.name: value.detach().clone()
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), torch.Tensor)
    }
    printed = io.StringIO()
    with redirect_stdout(printed):
        result = compute(inputs)
    for name, value in before.items():
        if not torch.equal(value, getattr(inputs, name).detach()):
            return f"it changes inputs.{name} in place; compute with a copy ({name}.clone())"
    if printed.getvalue():
        return "it prints, on every rank and for every micro-batch; return metrics instead"
    if not torch.isfinite(result.losses.loss).all():
        return "its loss is not finite; bound logarithms and exponentials (bounded_log_ratio)"
    for name, values in result.metrics.items():
        if not torch.isfinite(values.double()).all():
            return f"its metric {name} is not finite; bound logarithms and exponentials"
    gradient = _gradient(inputs, result)
    if gradient is None or not gradient.any():
        return (
            "no gradient reaches policy_logprobs; compute the loss from them without detach() or "
            "no_grad()"
        )
    if not torch.isfinite(gradient).all():
        return (
            "its gradient is not finite; avoid 0 / 0 and sqrt(0), also in branches of torch.where"
        )
    return None


def _check_repeatable(compute: _Compute, inputs: LossInputs) -> str | None:
    first = compute(inputs).losses
    # The first call may compile; only later ones count.
    started = time.monotonic()
    second = compute(inputs).losses
    seconds = time.monotonic() - started
    if seconds > _MAX_SECONDS:
        return (
            f"it took {seconds:.1f} s for {len(inputs.turns)} tokens; move the work out of the loss"
        )
    if not (torch.equal(first.loss, second.loss) and torch.equal(first.keep, second.keep)):
        return (
            "two calls with the same inputs give different losses, so no step could be replayed; use "
            "no random numbers and keep no state between calls"
        )
    return None


def _check_independent(compute: _Compute, inputs: LossInputs) -> str | None:
    """Compare a step with the same turns in another order, and in two micro-batches."""
    result = compute(inputs)
    gradient = _gradient(inputs, result)
    assert gradient is not None, "checked before"
    order = [*range(len(_TOKENS_PER_TURN))]
    cuts = {
        "in another order": [order[::-1]],
        "in two micro-batches": [order[:3], order[3:]],
    }
    for how, parts in cuts.items():
        for numbers in parts:
            rows, part = _part(inputs, numbers)
            found = compute(part)
            slopes = _gradient(part, found)
            pairs = [
                (result.losses.loss[rows], found.losses.loss),
                (gradient[rows], torch.zeros(()) if slopes is None else slopes),
                (result.losses.keep[rows].double(), found.losses.keep.double()),
            ]
            if not all(torch.allclose(a, b, _TOLERANCE, _TOLERANCE) for a, b in pairs):
                return (
                    f"the same turns {how} give other losses, but a step is computed in micro-batches "
                    "of whole turns; let the loss of a token depend on its own turn alone "
                    "(sequence_sums), and leave averages to --token_level_loss"
                )
    return None


def _check_empty(compute: _Compute, inputs: LossInputs) -> str | None:
    """Ranks with less work compute micro-batches without targets."""
    _, empty = _part(inputs, [])
    try:
        result = compute(empty)
    except UserCodeError as error:
        return f"it fails for a micro-batch without targets, which ranks compute to wait: {error}"
    if not result.losses.loss.requires_grad:
        return "without targets its loss has no gradient; compute it from policy_logprobs"
    return None


def _load() -> Answer:
    def tried(flags: Mapping[str, Any]) -> str | None:
        try:
            try_loss(AlgorithmSection.model_validate(flags))
        except AgentRLError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - without an answer, the launcher would wait
            text = one_line(f"{type(error).__name__}: {error}", _MAX_PROBLEM_CHARS)
            return f"--loss_calculator {flags['loss_calculator']}: its trial failed: {text}"
        return None

    async def answer(flags: Mapping[str, Any]) -> dict[str, Any]:
        return {"problem": await asyncio.to_thread(tried, flags)}

    return answer


if __name__ == "__main__":
    RequestServer(LoopWatch("the trial's event loop", "try the loss in a thread")).run(_load)
