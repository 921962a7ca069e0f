"""`agentrl sums`."""

import click

from agentrl.config.command_line import FlagCommand
from agentrl.config.sections import RootConfig
from agentrl_sums.source import sums as generated


@click.command("sums", cls=FlagCommand, sections=())
@click.option("--count", type=int, default=5, help="Number of sums. [5]")
def sums(config: RootConfig, count: int) -> int:
    """Print sums as they would be asked."""
    for text, answer in generated(count, seed=0):
        print(text, answer)
    return 0
