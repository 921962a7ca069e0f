"""Calls the user's function after every step (`--on_step`)."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.algorithms.formula_registry import users_function
from agentrl.trainer.metrics.history import StepMetrics


@dataclass(frozen=True)
class StepDone:
    """A step whose weights are published and whose ledger is committed as often as checkpoints are."""

    step: int
    """From 1."""
    policy_version: int
    """Version of the weights after the step."""
    metrics: Mapping[str, Any]
    """Its line in metrics.jsonl."""


async def call_after_step(reference: str | None, metrics: StepMetrics, version: int) -> None:
    """Call the function in a thread, so that heartbeats continue, and wait for it.

    A step that is repeated after a crash is reported again.

    Args:
        reference: of the function; None: there is none.
        metrics: of the step.
        version: of the weights after the step.

    Raises:
        ConfigError: the function cannot be imported.
        UserCodeError: it raised; the run ends, and the same command resumes it.
    """
    if reference is None:
        return
    done = StepDone(metrics.step, version, metrics.model_dump(mode="json", exclude_none=True))
    await asyncio.to_thread(users_function(reference, "--on_step"), done)
