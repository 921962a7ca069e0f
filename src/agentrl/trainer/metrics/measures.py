"""From what a step did to the line of figures about it."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev

from agentrl.data import StepStats
from agentrl.errors import TrainingError
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.metrics.history import History, StepMetrics
from agentrl.trainer.rl.step_groups import StepGroups
from agentrl.trainer.rl.step_lineage import masked_tokens

logger = logging.getLogger(__name__)

_MAX_CONSECUTIVE_SKIPS = 5


def step_metrics(
    step: int,
    found: StepGroups,
    stats: StepStats,
    outcome: StepOutcome,
    seconds: dict[str, float],
    *,
    num_ranks: int,
) -> StepMetrics:
    """Return the figures of one optimizer step.

    Args:
        step: its number, from 1.
        found: the groups that it consumed.
        stats: what went into it.
        outcome: what the ranks did.
        seconds: wall time by phase.
        num_ranks: all that the step kept busy.
    """
    made = outcome.skipped is None
    masked = masked_tokens(found, outcome)
    num_dropped = int(outcome.ratios.num_dropped.sum() + outcome.ratios.num_masked.sum())
    return StepMetrics(
        step=step,
        num_groups=len(found.groups),
        num_records=found.num_records,
        num_trained_records=found.num_reserved if made else 0,
        loss=finite(outcome.loss),
        grad_norm=finite(outcome.grad_norm),
        learning_rate=outcome.learning_rate,
        mask_fraction=outcome.mask_fraction,
        kl=finite(outcome.kl),
        entropy=finite(outcome.entropy),
        skipped=outcome.skipped,
        num_output_tokens=found.num_output_tokens,
        num_prompt_tokens=found.num_prompt_tokens,
        max_output_tokens=found.max_output_tokens,
        turns_mean=_ratio(found.num_turns, found.num_records),
        num_trained_tokens=stats.num_terms - num_dropped if made else 0,
        masked_tokens=masked,
        num_forward_tokens=stats.tokens_packed,
        num_flat_tokens=stats.tokens_flat,
        staleness=dict(sorted(found.staleness.items())),
        token_staleness=stats.staleness_histogram,
        route_conflicts=stats.num_route_conflicts,
        dropped=dict(found.dropped),
        seconds=seconds,
        time=time.time(),
        **reward_figures(found.scores),
        **_of_terms(outcome),
        **merge_ratios(stats),
        **speeds(stats, outcome, num_ranks=num_ranks),
    )


def reward_figures(scores: Sequence[float]) -> dict[str, float | None]:
    """Return the scores' mean, standard deviation (divisor: their number) and extremes."""
    if not scores:
        return dict.fromkeys(("reward_mean", "reward_std", "reward_min", "reward_max"))
    return {
        "reward_mean": fmean(scores),
        "reward_std": pstdev(scores),
        "reward_min": min(scores),
        "reward_max": max(scores),
    }


def merge_ratios(stats: StepStats) -> dict[str, float | None]:
    """Return how much less there was to compute than with every turn in a row of its own."""
    return {
        "merge_tokens": _ratio(stats.tokens_flat, stats.tokens_packed),
        "merge_attention": _ratio(stats.pairs_flat, stats.pairs_packed),
        "merge_blocks": _ratio(stats.blocks_flat, stats.blocks_packed),
    }


def speeds(stats: StepStats, outcome: StepOutcome, *, num_ranks: int) -> dict[str, float | None]:
    """Return tokens a second, and what share of the devices' peak that takes."""
    seconds = outcome.seconds["forward_backward"]
    peak = outcome.peak_tflops
    tflops = _ratio(outcome.flops / 1e12, seconds * num_ranks)
    return {
        "tokens_per_second": _ratio(stats.tokens_packed, seconds),
        "tflops": tflops,
        "mfu": None if tflops is None or peak is None else tflops / peak,
    }


def finite(value: float | None) -> float | None:
    """Return the value, None in the place of one that JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def check_finite(history: History, step: int, outcome: StepOutcome, output_path: Path) -> None:
    """Count skipped steps in a row.

    Raises:
        TrainingError: there are too many of them.
    """
    if outcome.skipped is None:
        history.consecutive_skips = 0
        return
    history.consecutive_skips += 1
    logger.warning("step %d is skipped: %s", step, outcome.skipped)
    if history.consecutive_skips >= _MAX_CONSECUTIVE_SKIPS:
        raise TrainingError(
            f"{history.consecutive_skips} optimizer steps in a row were skipped for "
            f"{outcome.skipped} (last: step {step}); lower --learning_rate or --max_grad_norm "
            f"and resume from {output_path}"
        )


def _of_terms(outcome: StepOutcome) -> dict[str, object]:
    found: dict[str, object] = {
        name: finite(value) if isinstance(value, float) else value
        for name, value in asdict(outcome.terms).items()
    }
    quantiles = outcome.terms.ratio_quantiles
    found["ratio_quantiles"] = {
        name: value for name, value in quantiles.items() if math.isfinite(value)
    }
    return found


def _ratio(over: float, under: float) -> float | None:
    return over / under if under > 0 else None
