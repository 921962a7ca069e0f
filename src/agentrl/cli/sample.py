"""`agentrl sample`."""

from collections.abc import Sequence

from agentrl.cli.uri import store_uri
from agentrl.config.loading import parse_flags


def main(argv: Sequence[str]) -> int:
    """Run one sampler process."""
    config = parse_flags(argv)
    store_uri(config)
    from agentrl.rollout.worker.sampler_process import run_sampler
    from agentrl.runtime.logs import setup_logging

    setup_logging("sampler")
    return run_sampler(config)
