"""`agentrl store rescore --scorer NAME`: score finished records anew, without sampling."""

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.cli.uri import opened_store
from agentrl.config.loading import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.rewards import AgentConfig, Scorer


def main(argv: Sequence[str]) -> int:
    """Add the scores of one scorer to every finished record that lacks them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--scorer")
    own, flags = parser.parse_known_args(list(argv))
    if own.scorer is None:
        raise ConfigError("say `agentrl store rescore --scorer NAME --run_name NAME ...`")
    return asyncio.run(_rescore(parse_flags(flags), own.scorer))


def configured_scorer(config: RootConfig, name: str) -> "tuple[Scorer, AgentConfig | None]":
    """Return a scorer, the user's own included, and the models that it may ask.

    Raises:
        ConfigError: there is no such scorer, or it lacks its configuration.
    """
    from agentrl.rewards import MCPScorerFactory, RegisteredScoring

    scoring = RegisteredScoring.load(config.rollout)
    scoring.check(name)
    return MCPScorerFactory.get_scorer(name), scoring.agent_config


async def _rescore(config: RootConfig, name: str) -> int:
    from agentrl.rewards.rescore import rescore

    scorer, agent_config = configured_scorer(config, name)
    async with opened_store(config) as store:
        counts = await rescore(store, scorer, agent_config)
    print(
        f"{scorer.name}@{scorer.version}: {counts.num_scored} records scored, "
        f"{counts.num_known} had this score, {counts.num_open} belong to unfinished groups, "
        f"{counts.num_undecided} could not be decided"
    )
    for reason in counts.reasons:
        print(f"  {reason}")
    return 1 if counts.num_undecided else 0
