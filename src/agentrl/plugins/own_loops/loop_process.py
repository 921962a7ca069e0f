"""Opens a run for a loop of the user's: all processes of `agentrl run`, with this one as the trainer."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl.config.loading import load_config
from agentrl.launcher.training_run import beside_own_loop
from agentrl.runtime.logs import setup_logging
from agentrl.runtime.processes.signals import stop_on_signals
from agentrl.trainer.bootstrap import FINISHING, follow, rank_of
from agentrl.trainer.rl.run_versions import beside_servers
from agentrl.trainer.rl.training_loop import TrainingRun, opened_training


@asynccontextmanager
async def open_run(config: str | Path | None = None, **flags: Any) -> AsyncIterator[TrainingRun]:
    """Start or resume a run whose steps the block makes.

    Store, servers and samplers start with the block and end with it. Leaving it writes the last
    checkpoint and the summary; the same call resumes a run that was stopped or killed.

    Under `torchrun`, all ranks call this: rank 0 runs the block, and the others do their share of its
    calls and exit here.

    Args:
        config: a YAML file of flags.
        flags: flags of `agentrl run`; they override the file.

    Raises:
        AgentRLError: a mistake of the user (before anything starts), or a process that failed.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
    given = {name: value for name, value in (("config", config),) if value is not None}
    resolved = load_config({**given, **flags, "num_processes": world_size})
    log = resolved.run.logs_dir / f"{resolved.run.run_name}_train_{rank}.log"
    setup_logging(f"trainer-{rank}", log, console=False)
    if rank != "0":
        with beside_servers(resolved), rank_of(resolved) as ranks:
            follow(ranks)
        raise SystemExit(0)
    async with beside_own_loop(resolved) as started:
        with beside_servers(started), rank_of(started) as ranks:
            stop = stop_on_signals(FINISHING)
            async with opened_training(started, ranks, stop=stop) as run:
                yield run
