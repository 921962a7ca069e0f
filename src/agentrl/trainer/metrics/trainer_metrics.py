"""The trainer's Prometheus metrics: totals of the run and figures of its last step."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentrl.trainer.metrics.history import History, StepMetrics

_LAST_STEP_GAUGES = {
    "reward_mean": "Mean score of the groups that the last step read first.",
    "reward_std": "Standard deviation of these scores.",
    "loss": "Loss of the last step.",
    "grad_norm": "Gradient norm of the last step, before clipping.",
    "learning_rate": "Learning rate of the last step.",
    "entropy": "Mean entropy of the policy at the last step, in nats.",
    "kl": "Mean KL estimate against the reference model at the last step.",
    "sampler_kl_k3": "Estimate of the KL of the trainer's policy from the sampler's.",
    "ratio_mean": "Mean importance ratio at the last step.",
    "ratio_max": "Largest importance ratio at the last step.",
    "clip_fraction": "Share of target tokens that the clip range cut off at the last step.",
    "drop_fraction": "Share of target tokens beyond the hard drop range at the last step.",
    "merge_tokens": "Tokens of separate rows over those computed at the last step.",
    "tokens_per_second": "Tokens per second through the model at the last step.",
    "mfu": "Model FLOPs utilization at the last step.",
}


def trainer_metrics(history: History) -> Iterator[Metric]:
    """Yield the metrics of a run so far."""
    steps = tuple(history.steps)
    # Read from the copy, like all figures of steps, because another thread may add a step.
    yield _gauge("step", "Optimizer steps done.", steps[-1].step if steps else 0)
    yield _counter("groups", "Groups consumed, dropped ones included.", history.groups_consumed)
    yield _counter(
        "trained_tokens", "Sampled tokens trained on.", _sum(steps, "num_trained_tokens")
    )
    yield _counter("forward_tokens", "Tokens through the model.", _sum(steps, "num_forward_tokens"))
    yield _labeled_counter(
        "masked_tokens", "Sampled tokens left out of the loss.", "reason", _masked_tokens(steps)
    )
    yield _labeled_counter(
        "dropped_records", "Records not trained on.", "reason", history.dropped()
    )
    yield _labeled_counter(
        "staleness_records", "Records by policy versions behind.", "versions", history.staleness()
    )
    yield _labeled_counter("seconds", "Wall time by phase.", "phase", dict(history.seconds))
    if steps:
        for name, text in _LAST_STEP_GAUGES.items():
            value = getattr(steps[-1], name)
            if value is not None:
                yield _gauge(name, text, value)
    if history.evals:
        last = history.evals[-1]
        yield _gauge("eval_reward_mean", "Mean score of the last evaluation.", last.reward_mean)


def _masked_tokens(steps: tuple[StepMetrics, ...]) -> Counter[str]:
    total: Counter[str] = Counter()
    for step in steps:
        total.update(step.masked_tokens)
    return total


def _sum(steps: tuple[StepMetrics, ...], name: str) -> int:
    return sum(getattr(step, name) for step in steps)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentrl_trainer_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"agentrl_trainer_{name}", text, value=value)


def _labeled_counter(name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(f"agentrl_trainer_{name}", text, labels=[label])
    for key, value in tuple(values.items()):
        family.add_metric([str(key)], value)
    return family
