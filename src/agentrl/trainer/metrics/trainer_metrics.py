"""The trainer's Prometheus metrics: totals of the run and figures of its last step."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentrl.runtime.telemetry.figure_words import (
    EVAL_FIGURES,
    STEP_FIGURES,
    TRAINER_TOTALS,
    FigureWords,
)
from agentrl.trainer.metrics.history import History, StepMetrics

_LAST_STEP_GAUGES = (
    *("reward_mean", "reward_std", "loss", "grad_norm", "learning_rate", "entropy", "kl"),
    *("sampler_kl_k3", "ratio_mean", "ratio_max", "clip_fraction", "drop_fraction"),
    *("merge_tokens", "tokens_per_second", "mfu"),
)


def trainer_metrics(history: History) -> Iterator[Metric]:
    """Yield the metrics of a run so far."""
    steps = tuple(history.steps)
    # Read from the copy, like all figures of steps, because another thread may add a step.
    yield _gauge("step", TRAINER_TOTALS["step"], steps[-1].step if steps else 0)
    yield _counter("groups", history.groups_consumed)
    yield _counter("trained_tokens", _sum(steps, "num_trained_tokens"))
    yield _counter("forward_tokens", _sum(steps, "num_forward_tokens"))
    yield _labeled_counter("masked_tokens", "reason", _masked_tokens(steps))
    yield _labeled_counter("dropped_records", "reason", history.dropped())
    yield _labeled_counter("staleness_records", "versions", history.staleness())
    yield _labeled_counter("seconds", "phase", dict(history.seconds))
    if steps:
        for name in _LAST_STEP_GAUGES:
            value = getattr(steps[-1], name)
            if value is not None:
                yield _gauge(name, STEP_FIGURES[name], value)
    if history.evals:
        last = history.evals[-1]
        yield _gauge("eval_reward_mean", EVAL_FIGURES["reward_mean"], last.reward_mean)


def _masked_tokens(steps: tuple[StepMetrics, ...]) -> Counter[str]:
    total: Counter[str] = Counter()
    for step in steps:
        total.update(step.masked_tokens)
    return total


def _sum(steps: tuple[StepMetrics, ...], name: str) -> int:
    return sum(getattr(step, name) for step in steps)


def _gauge(name: str, words: FigureWords, value: float) -> Metric:
    return GaugeMetricFamily(f"agentrl_trainer_{name}", words.meaning, value=value)


def _counter(name: str, value: float) -> Metric:
    return CounterMetricFamily(f"agentrl_trainer_{name}", TRAINER_TOTALS[name].meaning, value=value)


def _labeled_counter(name: str, label: str, values: Mapping[Any, float]) -> Metric:
    text = TRAINER_TOTALS[name].meaning
    family = CounterMetricFamily(f"agentrl_trainer_{name}", text, labels=[label])
    for key, value in tuple(values.items()):
        family.add_metric([str(key)], value)
    return family
