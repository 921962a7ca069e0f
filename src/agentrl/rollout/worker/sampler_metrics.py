"""What a sampler tells Prometheus: what it plays, played, and why it waits."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentrl.rollout.worker.sampling_loop import LoopState


def sampler_metrics(state: LoopState | None) -> Iterator[Metric]:
    """Yield what a sampler did so far; nothing before its loop has begun."""
    if state is None:
        return
    counts = state.counts
    yield _gauge("running_rollouts", "Slots that are played or scored now.", state.num_running)
    yield _gauge("concurrency", "Slots that may be played at a time now.", state.max_running)
    yield _gauge("servers_up", "Inference servers that take requests.", state.num_servers)
    ended = CounterMetricFamily(
        "agentrl_sampler_slots", "Slots by what became of them.", labels=["end"]
    )
    for end in ("finished", "scored", "failed", "handed_back", "lost", "taken_up"):
        ended.add_metric([end], getattr(counts, end))
    yield ended
    yield CounterMetricFamily(
        "agentrl_sampler_output_tokens", "Tokens sampled.", value=counts.num_output_tokens
    )
    branches = CounterMetricFamily(
        "agentrl_sampler_branches",
        "Turns whose prompts do not extend their parents in full, by reason.",
        labels=["reason"],
    )
    for reason, number in tuple(counts.branches.items()):
        branches.add_metric([reason], number)
    yield branches
    yield _gauge(
        "failures_in_a_row",
        "Rollouts that the infrastructure failed since the last good one.",
        counts.trouble.num_failures,
    )
    waited = CounterMetricFamily(
        "agentrl_sampler_waiting_seconds", "Time with nothing to do, by reason.", labels=["reason"]
    )
    for reason, seconds in state.seconds_waiting.items():
        waited.add_metric([reason], seconds)
    yield waited


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentrl_sampler_{name}", text, value=value)
