"""The sampler process: from its configuration to its exit status. Torch-free."""

import uvloop

from agentrl.config.sections import RootConfig
from agentrl.rollout import SamplingScheduler
from agentrl.sampler.scoring import RegisteredScoring
from agentrl.schema import Split


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
    return uvloop.run(_sample(config, split))


async def _sample(config: RootConfig, split: Split | None) -> int:
    scoring = RegisteredScoring.load(config.rollout)
    return await SamplingScheduler(config, split=split, scoring=scoring).run()
