"""The sampler process of `agentrl sample`: from its configuration to its exit status. Torch-free.

It assembles a `SamplingScheduler` from the flags (scorers, summarizer, agent gateway) and serves
its metrics. The scheduler is independent of the gateway and the metrics: programs that embed it
need neither.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvloop
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentrl.config.sections import RootConfig
from agentrl.datasets.task_source import load_sampler_module, task_source
from agentrl.models.checkpoints.resolve import resolve_tokenizer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout.agent import (
    AgentEndpointServer,
    AgentSampler,
    AgentThread,
    configured_agent,
)
from agentrl.rollout.async_sampler import AsyncSampler
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.worker.attempt import MakeSampler
from agentrl.rollout.worker.sampling_loop import LoopState
from agentrl.rollout.worker.scheduler import SamplingScheduler, sampler_class_for
from agentrl.rollout.worker.summarizer import ModelSummarizer
from agentrl.runtime.telemetry.figure_words import SAMPLER_FIGURES
from agentrl.runtime.telemetry.loop_watch import LoopWatch
from agentrl.runtime.telemetry.prometheus import metrics_endpoint
from agentrl.schema import EnvironmentTask, MCPTask, Record, Task

GC_THRESHOLD = 10_000
"""Objects created and not yet freed after which the garbage collector runs."""


def run_sampler(config: RootConfig) -> int:
    """Sample until the run is over, no work is left, or a signal ends it."""
    collect_less_garbage()
    return uvloop.run(_sample(config))


def collect_less_garbage() -> None:
    """Make the garbage collector run less often and over fewer objects.

    Imported modules live forever and are frozen. Rollouts hold many objects, and reference counting
    frees nearly all of them, so a collection every few hundred objects finds next to nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


@asynccontextmanager
async def open_scoring(
    config: RootConfig,
) -> AsyncIterator[tuple[RegisteredScoring, ModelSummarizer | None]]:
    """Load the scorers and, if configured, the summarizer."""
    scoring = RegisteredScoring.load(config.rollout)
    models = scoring.agent_config
    settings = None if models is None else models.summarizer_settings()
    if settings is None:
        yield scoring, None
        return
    tokenizer = resolve_tokenizer(config.model.model_name_or_path)
    async with ModelSummarizer.open(settings, tokenizer) as summarizer:
        yield scoring, summarizer


async def _sample(config: RootConfig) -> int:
    load_sampler_module(config.data)
    watch = LoopWatch(
        "the sampler's event loop", "samplers and async scorers must not call functions that block"
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(watch.watching(asyncio.get_running_loop()))
        agents = stack.enter_context(AgentThread.open())
        scoring, summarizer = await stack.enter_async_context(open_scoring(config))
        scheduler = SamplingScheduler(
            config,
            await _agent_sampler(config, agents, stack),
            scoring=scoring,
            summarizer=summarizer,
            notice=lambda: watch.notice or agents.notice,
        )
        stack.enter_context(metrics_endpoint(config.run, lambda: sampler_metrics(scheduler.state)))
        return await scheduler.run()


async def _agent_sampler(
    config: RootConfig, agents: AgentThread, stack: AsyncExitStack
) -> MakeSampler | None:
    """Return what makes rollouts of the configured agent and environments; None without either."""
    if not config.agents.has_agent and not config.data.environments:
        return None
    agent = agents.wrapped(configured_agent(config)) if config.agents.has_agent else None
    endpoints = await stack.enter_async_context(
        AgentEndpointServer.open(config.agents, config.model.model_name)
    )
    sources: dict[str, MakeSampler] = {}

    def sampler_of(env_id: str) -> MakeSampler:
        kind = env_id.partition(":")[0]
        if kind not in sources:
            opened = task_source(env_id).samplers(config.data, endpoints)
            sources[kind] = stack.enter_context(opened)
        return sources[kind]

    def make(task: Task, record: Record, context: RolloutContext) -> AsyncSampler[Any]:
        if isinstance(task, EnvironmentTask):
            return sampler_of(task.env_id)(task, record, context)
        if agent is None or not isinstance(task, MCPTask):
            return sampler_class_for(task)(task, record, context)
        return AgentSampler(task, record, context, agent=agent, endpoints=endpoints)

    return make


def sampler_metrics(state: LoopState | None) -> Iterator[Metric]:
    """Yield the Prometheus metrics of a sampler; none before its loop has started."""
    if state is None:
        return
    counts = state.counts
    yield _gauge("running_rollouts", state.num_running)
    yield _gauge("concurrency", state.max_running)
    yield _gauge("servers_up", state.num_servers)
    ends = ("finished", "scored", "unscorable", "failed", "released", "lost", "resumed")
    yield _labeled_counter("slots", "end", {end: getattr(counts, end) for end in ends})
    yield CounterMetricFamily(*_help("output_tokens"), value=counts.num_output_tokens)
    yield _labeled_counter("branches", "reason", counts.branches)
    yield _labeled_counter("branched_rollouts", "rule", counts.branched)
    yield _gauge("failures_in_a_row", counts.backoff.num_failures)
    yield _labeled_counter("waiting_seconds", "reason", state.seconds_waiting)


def _labeled_counter(name: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(*_help(name), labels=[label])
    for key, value in tuple(values.items()):
        family.add_metric([key], value)
    return family


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(*_help(name), value=value)


def _help(name: str) -> tuple[str, str]:
    return f"agentrl_sampler_{name}", SAMPLER_FIGURES[name].meaning
