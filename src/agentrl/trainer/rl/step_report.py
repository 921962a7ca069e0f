"""The report of an optimizer step: its metrics, and one `TurnTraining` per turn.

Input: groups, batch and outcome of a step. Output: documents and figures. Pure functions.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from agentrl.algorithms.losses import MAX_LOG_RATIO
from agentrl.data import SelectedGroup, StepBatch, StepStats
from agentrl.schema import TOKEN_USES, RatioStats, TokenTrainings, TurnTraining
from agentrl.trainer.learner.learner import StepOutcome
from agentrl.trainer.learner.target_stats import TargetTrace
from agentrl.trainer.metrics.history import StepMetrics
from agentrl.trainer.metrics.measures import finite, learner_figures, ratio
from agentrl.trainer.rl.step_groups import StepGroups

logger = logging.getLogger(__name__)

RATIO_OUT_OF_RANGE = "ratio_out_of_range"
"""The importance ratio left the hard drop range."""
IMPORTANCE_CORRECTION = "importance_correction"
"""A correction's bounds or its veto masked the token."""


def step_metrics(
    step_groups: StepGroups,
    stats: StepStats,
    outcome: StepOutcome,
    *,
    num_ranks: int,
    seconds: dict[str, float],
    merge_error: float | None = None,
) -> StepMetrics:
    """Return the figures of one optimizer step.

    Args:
        step_groups: the consumed groups.
        stats: sizes of the batch.
        outcome: result of the step.
        num_ranks: number of ranks, for figures per device.
        seconds: wall time by phase.
        merge_error: relative gradient error, if the step was verified.
    """
    is_applied = outcome.skipped is None
    records = step_groups.records
    copied = sum(group.num_inherited_tokens for group in step_groups.groups)
    num_sampled = sum(record.num_sampled for record in records) - copied
    num_dropped = int(outcome.ratios.num_dropped.sum() + outcome.ratios.num_masked.sum())
    return StepMetrics(
        step=step_groups.step,
        num_groups=len(step_groups.groups),
        num_records=len(records),
        num_trained_records=len(step_groups.ages) if is_applied else 0,
        mask_fraction=outcome.mask_fraction,
        kl=finite(outcome.kl),
        num_output_tokens=num_sampled,
        num_prompt_tokens=sum(record.num_tokens - record.num_sampled for record in records),
        max_output_tokens=max((record.num_sampled for record in records), default=0),
        turns_mean=ratio(sum(record.num_turns for record in records), len(records)),
        num_trained_tokens=stats.num_targets - num_dropped if is_applied else 0,
        masked_tokens=masked_tokens(step_groups, outcome),
        staleness=step_groups.staleness,
        token_staleness=stats.staleness_histogram,
        route_conflicts=stats.num_expert_conflicts,
        dropped=dict(step_groups.dropped),
        merge_error=merge_error,
        teacher_wait_seconds=round(step_groups.teacher_wait_seconds, 3),
        loss_metrics={
            name: value for name, value in outcome.loss_metrics.items() if math.isfinite(value)
        },
        seconds=seconds,
        branched_records=Counter(record.rule for record in records if record.rule is not None),
        **_reward_figures(step_groups.groups),
        **_credit_figures(step_groups.groups),
        branch_reuse=ratio(num_sampled + copied, num_sampled)
        if any(group.has_branches for group in step_groups.groups)
        else None,
        **_target_figures(outcome),
        **learner_figures(outcome, stats, num_ranks=num_ranks),
    )


def _reward_figures(groups: Sequence[SelectedGroup]) -> dict[str, float | None]:
    """Return the scores' mean and standard deviation under chains, and their extremes.

    Rollouts that leave others are no independent samples: a rule may place them where the policy
    fails, and their plain mean would not be that of the policy.
    """
    scored = [
        (score, weight)
        for group in groups
        for score, weight in zip(group.scores, group.weights, strict=True)
        if score is not None
    ]
    if not scored:
        return {}
    scores, weights = zip(*scored, strict=True)
    mean = fmean(scores, weights)
    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(fmean([(score - mean) ** 2 for score in scores], weights)),
        "reward_min": min(scores),
        "reward_max": max(scores),
    }


def _credit_figures(groups: Sequence[SelectedGroup]) -> dict[str, float | None]:
    by_record: dict[str, list[float]] = {}
    for group in groups:
        for turn in group.turns:
            by_record.setdefault(turn.record_id, []).append(turn.advantage)
    branching = [group for group in groups if group.has_branches]
    saved = [group for group in branching if group.usable and group.has_equal_chains]
    return {
        "credit_spread": fmean(map(pstdev, by_record.values())) if by_record else None,
        "saved_groups": ratio(len(saved), len(branching)),
    }


def _target_figures(outcome: StepOutcome) -> dict[str, Any]:
    figures: dict[str, Any] = {
        name: finite(value) if isinstance(value, float) else value
        for name, value in asdict(outcome.targets).items()
    }
    quantiles = outcome.targets.ratio_quantiles
    figures["ratio_quantiles"] = {
        name: value for name, value in quantiles.items() if math.isfinite(value)
    }
    return figures


def masked_tokens(step_groups: StepGroups, outcome: StepOutcome) -> dict[str, int]:
    """Return the number of sampled tokens that are not in the step's loss, by reason."""
    total: Counter[str] = Counter()
    for group in step_groups.groups:
        for turn in group.left_out:
            total[turn.reason] += turn.num_targets
    ratios = outcome.ratios
    if outcome.skipped is not None:
        total[outcome.skipped] += int(ratios.num_targets.sum())
    else:
        total[RATIO_OUT_OF_RANGE] += int(ratios.num_dropped.sum())
        total[IMPORTANCE_CORRECTION] += int(ratios.num_masked.sum())
    return {reason: count for reason, count in sorted(total.items()) if count}


def turn_trainings(
    consumer: str, step_groups: StepGroups, batch: StepBatch, outcome: StepOutcome
) -> list[TurnTraining]:
    """Return one entry for each turn of the step, left-out turns included."""
    return [*_left_out(consumer, step_groups), *_trained(consumer, step_groups, batch, outcome)]


def _left_out(consumer: str, step_groups: StepGroups) -> Iterator[TurnTraining]:
    for group in step_groups.groups:
        for turn in group.left_out:
            yield TurnTraining(
                id=f"{consumer}/{step_groups.step}/{turn.turn_id}",
                consumer=consumer,
                step=step_groups.step,
                turn_id=turn.turn_id,
                record_id=turn.record_id,
                task_id=group.task_id,
                num_tokens=turn.num_targets,
                num_trained_tokens=0,
                masked={turn.reason: turn.num_targets},
                staleness=turn.staleness,
            )


def _trained(
    consumer: str, step_groups: StepGroups, batch: StepBatch, outcome: StepOutcome
) -> Iterator[TurnTraining]:
    turns = {turn.turn_id: (group, turn) for group in step_groups.groups for turn in group.turns}
    ratios, tokens = outcome.ratios, dict(_token_trainings(outcome.trace))
    for row, number in enumerate(ratios.turns.tolist()):
        group, turn = turns[batch.turn_ids[number]]
        num_targets = int(ratios.num_targets[row])
        masked = {
            reason: int(counts[row])
            for reason, counts in (
                (RATIO_OUT_OF_RANGE, ratios.num_dropped),
                (IMPORTANCE_CORRECTION, ratios.num_masked),
            )
            if counts[row]
        }
        if outcome.skipped is not None:
            masked = {outcome.skipped: num_targets}
        yield TurnTraining(
            id=f"{consumer}/{step_groups.step}/{turn.turn_id}",
            consumer=consumer,
            step=step_groups.step,
            turn_id=turn.turn_id,
            record_id=turn.record_id,
            task_id=group.task_id,
            position=number,
            num_tokens=num_targets,
            num_trained_tokens=num_targets - sum(masked.values()),
            num_clipped_tokens=int(ratios.num_clipped[row]),
            masked=masked,
            advantage=turn.advantage,
            worth=group.worths.get(turn.turn_id),
            staleness=step_groups.step - 1 - int(turn.versions.min()),
            ratio=RatioStats(
                mean=float(ratios.mean[row]),
                std=float(ratios.std[row]),
                min=float(ratios.min[row]),
                max=float(ratios.max[row]),
            ),
            tokens=tokens[number],
        )


def _token_trainings(trace: TargetTrace) -> Iterator[tuple[int, TokenTrainings]]:
    """Yield the number of each turn with the step's values at its tokens."""
    uses = np.select(
        [trace.masked, ~trace.kept, trace.clipped],
        [TOKEN_USES.index(use) for use in (IMPORTANCE_CORRECTION, RATIO_OUT_OF_RANGE, "clipped")],
    )
    log_ratios = trace.log_ratios.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO).astype("<f2")
    order = np.argsort(trace.turns, kind="stable")
    numbers, starts = np.unique(trace.turns[order], return_index=True)
    for number, indices in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        entropies = trace.entropies[indices]
        yield (
            number,
            TokenTrainings(
                log_ratios=log_ratios[indices].tobytes(),
                entropies=b"" if np.isnan(entropies).any() else entropies.astype("<f2").tobytes(),
                uses=uses[indices].astype(np.uint8).tobytes(),
            ),
        )


def log_step(metrics: StepMetrics, max_steps: int) -> None:
    """Write a step's main figures to the log."""
    staleness = metrics.staleness
    num_records = sum(staleness.values())
    logger.info(
        "step %d/%d reward %s loss %s grad %s lr %.2e entropy %s staleness %.2f "
        "groups %d dropped %s seconds %s",
        metrics.step,
        max_steps,
        _formatted(metrics.reward_mean),
        _formatted(metrics.loss),
        _formatted(metrics.grad_norm),
        metrics.learning_rate,
        _formatted(metrics.entropy),
        sum(key * count for key, count in staleness.items()) / num_records if num_records else 0.0,
        metrics.num_groups,
        metrics.dropped or "none",
        {phase: round(spent, 2) for phase, spent in metrics.seconds.items()},
    )


def _formatted(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
