"""Figures of one optimizer step that reinforcement learning and fine-tuning share."""

import logging
import math
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from agentrl.data import StepStats
from agentrl.errors import TrainingError
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.metrics.history import History

logger = logging.getLogger(__name__)

_MAX_CONSECUTIVE_SKIPS = 5


def learner_figures(outcome: StepOutcome, stats: StepStats, *, num_ranks: int) -> dict[str, Any]:
    """Return the fields of `StepMetrics` that depend on the ranks' work and the batch."""
    return {
        "loss": finite(outcome.loss),
        "grad_norm": finite(outcome.grad_norm),
        "learning_rate": outcome.learning_rate,
        "entropy": finite(outcome.entropy),
        "skipped": outcome.skipped,
        "merge": stats.merge,
        "num_forward_tokens": stats.tokens_packed,
        "num_flat_tokens": stats.tokens_flat,
        "time": time.time(),
        **_merge_ratios(stats),
        **_speeds(stats, outcome, num_ranks=num_ranks),
    }


def _merge_ratios(stats: StepStats) -> dict[str, float | None]:
    """Return the cost of separate rows for all turns, divided by the actual cost."""
    return {
        "merge_tokens": ratio(stats.tokens_flat, stats.tokens_packed),
        "merge_rollouts": ratio(stats.tokens_by_rollout, stats.tokens_packed),
        "merge_attention": ratio(stats.pairs_flat, stats.pairs_packed),
        "merge_blocks": ratio(stats.blocks_flat, stats.blocks_packed),
    }


def _speeds(stats: StepStats, outcome: StepOutcome, *, num_ranks: int) -> dict[str, float | None]:
    """Return tokens per second, and the share of the devices' peak."""
    seconds = outcome.seconds["forward_backward"]
    peak = outcome.peak_tflops
    tflops = ratio(outcome.flops / 1e12, seconds * num_ranks)
    return {
        "tokens_per_second": ratio(stats.tokens_packed * outcome.num_updates, seconds),
        "tflops": tflops,
        "mfu": None if tflops is None or peak is None else tflops / peak,
    }


def finite(value: float | None) -> float | None:
    """Return the value, or None if JSON cannot represent it."""
    return value if value is not None and math.isfinite(value) else None


def num_skipped_last(history: History) -> int:
    """Return how many of the last steps were skipped, one after the other."""
    return len(list(takewhile(lambda step: step.skipped is not None, reversed(history.steps))))


def check_last_steps(history: History) -> None:
    """Warn of a run that ends with skipped steps."""
    skipped = num_skipped_last(history)
    if not skipped:
        return
    reason = history.steps[-1].skipped
    if skipped == len(history.steps):
        raise TrainingError(
            f"the model has learned nothing: all steps ({skipped}) were skipped for {reason}; look at "
            "the loss, and lower --learning_rate or --max_grad_norm"
        )
    logger.warning("the last steps (%d) were skipped for %s, and changed nothing", skipped, reason)


def check_finite(history: History, step: int, outcome: StepOutcome, output_path: Path) -> None:
    """Tell of a skipped step, and refuse to go on after several in a row."""
    if outcome.skipped is None:
        return
    num_skipped = num_skipped_last(history) + 1
    logger.warning("step %d is skipped: %s", step, outcome.skipped)
    if num_skipped >= _MAX_CONSECUTIVE_SKIPS:
        raise TrainingError(
            f"{num_skipped} optimizer steps in a row were skipped for "
            f"{outcome.skipped} (last: step {step}); lower --learning_rate or --max_grad_norm "
            f"and resume from {output_path}"
        )


def ratio(numerator: float, denominator: float) -> float | None:
    """Return `numerator / denominator`, None if `denominator` is 0."""
    return numerator / denominator if denominator > 0 else None
