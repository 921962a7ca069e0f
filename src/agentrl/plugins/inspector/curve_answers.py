"""The figures of a run's steps as columns for curves, thinned to the resolution of a screen.

Input: a store, and a range of steps. Output: columns. A long run has one point per bucket of
consecutive steps: their mean, with the lowest and the highest value, so that no spike is lost.
Totals are taken over all steps.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from agentrl.plugins.inspector.alarms import rung_alarms
from agentrl.plugins.inspector.run_answers import consumer_of, run_of
from agentrl.store import TrajectoryStore

CURVES = (
    *("reward_mean", "reward_std", "loss", "grad_norm", "learning_rate", "kl", "sampler_kl_k3"),
    *("entropy", "ratio_mean", "ratio_max", "logprob_gap", "clip_fraction", "drop_fraction"),
    *("clip_fraction_positive", "clip_fraction_negative", "mask_fraction", "tflops", "mfu"),
    *("tokens_per_second", "merge_tokens", "turns_mean", "max_output_tokens", "num_output_tokens"),
    *("merge_rollouts", "branch_reuse", "credit_spread", "saved_groups"),
    *("num_records", "num_trained_records", "num_trained_tokens", "time"),
)
"""Figures with one number per step."""
SPREADS = ("seconds", "staleness", "masked_tokens", "dropped", "branched_records")
"""Figures with several named numbers per step."""
MAX_POINTS = 1200
RECENT_STEPS = 120

_Steps = Sequence[dict[str, Any]]


async def curves(store: TrajectoryStore, after: int, until: int | None = None) -> dict[str, Any]:
    """Return the figures of the steps after `after`, up to `until`, and all evaluations."""
    consumer = consumer_of(await run_of(store))
    found = await store.figures.steps(consumer, (*CURVES, *SPREADS, "skipped"), after=after)
    steps = [step for step in found if until is None or step["step"] <= until]
    recent = steps[-RECENT_STEPS:]
    return {
        **thinned(steps),
        "totals": {name: _sum(steps, name) for name in SPREADS},
        "recent": {
            "step": [step["step"] for step in recent],
            "seconds": [step.get("seconds", {}) for step in recent],
        },
        "alarms": [
            {"step": step, **alarm.model_dump(mode="json")} for step, alarm in rung_alarms(steps)
        ],
        "evals": [
            {
                "version": one["version"],
                "reward_mean": one.get("reward_mean"),
                "low": (one.get("total") or {}).get("low"),
                "high": (one.get("total") or {}).get("high"),
            }
            for one in await store.figures.evaluations(consumer)
        ],
    }


def thinned(steps: _Steps) -> dict[str, Any]:
    """Return the figures in columns of at most `MAX_POINTS` points, each named by its last step."""
    size = max(1, -(-len(steps) // MAX_POINTS))
    buckets = [steps[start : start + size] for start in range(0, len(steps), size)]
    columns = {name: [step.get(name) for step in steps] for name in CURVES}
    given = {
        name: [_known(column[start : start + size]) for start in range(0, len(steps), size)]
        for name, column in columns.items()
        if any(value is not None for value in column)
    }
    answer: dict[str, Any] = {
        "num_steps": len(steps),
        "steps_a_point": size,
        "step": [bucket[-1]["step"] for bucket in buckets],
        "curves": {
            name: [sum(values) / len(values) if values else None for values in column]
            for name, column in given.items()
        },
        "spreads": {name: [_sum(bucket, name) for bucket in buckets] for name in SPREADS},
    }
    for end, extreme in (("lows", min), ("highs", max)) if size > 1 else ():
        answer[end] = {
            name: [extreme(values, default=None) for values in column]
            for name, column in given.items()
        }
    return answer


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sum(steps: _Steps, name: str) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(int)
    for step in steps:
        for key, value in (step.get(name) or {}).items():
            total[key] += value
    return total
