"""`agentrl run`."""

import asyncio
from collections.abc import Sequence

from agentrl.config.loading import parse_flags


def main(argv: Sequence[str]) -> int:
    """Train on this machine, all processes included; on a further machine, ranks only."""
    config = parse_flags(argv)
    from agentrl.launcher.multi_node import join_training
    from agentrl.launcher.run import run_training

    train = join_training if config.trainer.machine_rank else run_training
    return asyncio.run(train(config))
