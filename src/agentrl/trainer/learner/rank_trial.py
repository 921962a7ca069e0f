"""Tries the user's functions on every rank: a file may be on one machine only, or another version of it.

Ranks other than 0 import the user's loss and rates themselves, and a rank that fails alone would leave
the others waiting in a collective.
"""

import platform

from agentrl.algorithms.function_trial import try_functions
from agentrl.config.loading import flat_values
from agentrl.config.own_function import SOURCES, with_sources
from agentrl.config.sections import RootConfig
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.trainer.learner.loss_trial import try_loss


def problem_of_functions(config: RootConfig, ranks: Ranks) -> str | None:
    """Return the first mistake of the user's functions, the same on every rank (collective)."""
    problem, sources = None, {}
    try:
        try_functions(config.algorithm, config.trainer)
        try_loss(config.algorithm)
        sources = with_sources(flat_values(config)).get(SOURCES, {})
    except ConfigError as error:
        problem = str(error)
    found = ranks.gather_all((platform.node(), problem, sources))
    _, of_main, expected = found[0]
    if all(other == of_main for _, other, _ in found) and of_main is not None:
        return of_main
    for rank, (host, other, digests) in enumerate(found):
        changed = next((flag for flag, digest in digests.items() if digest != expected[flag]), None)
        if other is None and changed is not None:
            other = (
                f"--{changed} {flat_values(config)[changed]}: its source is not that of rank 0; copy "
                "the file to all machines"
            )
        if other is not None:
            return f"rank {rank} ({host}): {other}"
    return None
