"""`agentrl run`."""

import asyncio
from collections.abc import Sequence

from agentrl.config.loading import parse_flags


def main(argv: Sequence[str]) -> int:
    """Train on this machine, all processes included."""
    config = parse_flags(argv)
    from agentrl.launcher.run import run_training

    return asyncio.run(run_training(config))
