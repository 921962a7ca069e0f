"""What commands share that may be one rank of several."""

import os

import click

from agentrl.config.command_line import given_flags
from agentrl.config.sections import RunSection
from agentrl.errors import ConfigError


def refuse_placement_flags(context: click.Context) -> None:
    """Refuse flags that place processes, for commands that start only this one."""
    for name in ("trainer_gpus", "inference_gpus", "num_gpus"):
        if name in given_flags(context):
            raise ConfigError(
                f"--{name} applies to `agentrl run`, which starts ranks and servers; this process "
                "uses the GPUs in CUDA_VISIBLE_DEVICES"
            )


def log_by_rank(run: RunSection) -> None:
    """Send this rank's output to its own log file where ranks share one terminal."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    path = run.logs_dir / f"{run.run_name}_train_{os.environ['RANK']}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
