"""The sampler process: from its configuration to its exit status. Torch-free."""

import gc
from contextlib import AsyncExitStack
from functools import partial

import uvloop

from agentrl.config.sections import RootConfig
from agentrl.rewards import RegisteredScoring
from agentrl.rollout import SamplingScheduler
from agentrl.rollout.agent import AgentSampler, Gateway, load_agent
from agentrl.rollout.worker.attempt import MakeSampler
from agentrl.rollout.worker.resources import tokenizer_dir
from agentrl.rollout.worker.sampler_metrics import sampler_metrics
from agentrl.rollout.worker.summarizer import ModelSummarizer
from agentrl.runtime.prometheus import metrics_endpoint
from agentrl.schema import Split

YOUNG_OBJECTS = 10_000
"""Objects made and not yet freed after which the collector looks at them."""


def run_sampler(config: RootConfig, split: Split | None = None) -> int:
    """Sample until the run is over, nothing is left to do, or a signal ends it.

    Args:
        config: the process's configuration.
        split: claim only slots of this split; None means any.

    Returns:
        The exit status: 0, or 130 when a second signal cut the drain short.

    Raises:
        ConfigError: a flag, file, model, tool server or scorer cannot be used.
        StoreError: the store is unreachable.
    """
    collect_less_garbage()
    return uvloop.run(_sample(config, split))


def collect_less_garbage() -> None:
    """Let the collector look at less, and less often.

    What was imported stays for good and is set aside. What many rollouts hold at once is not worth
    a look every few hundred objects; nearly all of it is freed without the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


async def _sample(config: RootConfig, split: Split | None) -> int:
    scoring = RegisteredScoring.load(config.rollout)
    models = scoring.agent_config
    settings = None if models is None else models.summarizer_settings()
    async with AsyncExitStack() as stack:
        summarizer = None
        if settings is not None:
            own = tokenizer_dir(config.model.model_name_or_path)
            summarizer = await stack.enter_async_context(ModelSummarizer.open(settings, own))
        scheduler = SamplingScheduler(
            config,
            await _agent_sampler(config, stack),
            split=split,
            scoring=scoring,
            summarizer=summarizer,
        )
        stack.enter_context(
            metrics_endpoint(
                config.run.metrics_host,
                config.run.metrics_port,
                lambda: sampler_metrics(scheduler.state),
            )
        )
        return await scheduler.run()


async def _agent_sampler(config: RootConfig, stack: AsyncExitStack) -> MakeSampler | None:
    """Return what plays tasks with the configured agent, behind a gateway; None without one."""
    if config.agents.agent is None:
        return None
    agent = load_agent(config.agents.agent)
    gateway = await stack.enter_async_context(Gateway.open(config.agents, config.model.model_name))
    return partial(AgentSampler, agent=agent, gateway=gateway)
