"""`agentrl tasks add|stats`."""

import asyncio
from collections.abc import Sequence

from agentrl.cli.uri import store_uri
from agentrl.config.loading import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Add the questions of `--train_file` to a run, or count what it has."""
    action, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("--") else ("", argv)
    config = parse_flags(flags)
    if action not in ("add", "stats"):
        raise ConfigError(
            "say `agentrl tasks add --train_file FILE ...` or `agentrl tasks stats ...`"
        )
    return asyncio.run(_add(config) if action == "add" else _stats(config))


async def _add(config: RootConfig) -> int:
    from agentrl.rewards import MCPScorerFactory, load_scorer_module
    from agentrl.rollout.datasets import train_tasks
    from agentrl.store import TrajectoryStore

    if config.data.train_file is None:
        raise ConfigError("`agentrl tasks add` needs --train_file")
    if config.rollout.scorer_module is not None:
        load_scorer_module(config.rollout.scorer_module)
    tasks = train_tasks(config.data, config.run.seed, MCPScorerFactory.names())
    async with TrajectoryStore.connect(store_uri(config), config.run.run_name) as store:
        await store.ensure_schema()
        print(f"{await store.add_tasks(tasks)} new tasks in {store.database_name!r}")
    return 0


async def _stats(config: RootConfig) -> int:
    from agentrl.store import TrajectoryStore

    async with TrajectoryStore.connect(store_uri(config), config.run.run_name) as store:
        for split in ("train", "eval", "test", "valid"):
            total = await store.count_tasks(split=split)
            if total:
                completed = await store.count_tasks(split=split, status="completed")
                print(f"{split:6} {completed} of {total} tasks completed")
    return 0
