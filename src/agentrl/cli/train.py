"""`agentrl train`."""

import os
from collections.abc import Sequence
from pathlib import Path

from agentrl.cli.uri import store_uri
from agentrl.config.loading import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.runtime.signals import INTERRUPTED


def main(argv: Sequence[str]) -> int:
    """Train; under torchrun or accelerate launch this is one rank of several."""
    config = parse_flags(argv)
    store_uri(config)
    log_by_rank(config)
    from agentrl.trainer.train_process import train

    result = train(config)
    return INTERRUPTED if result is not None and result.status == "stopped" else 0


def log_by_rank(config: RootConfig) -> None:
    """Send this rank's output to its own log file where ranks share one terminal."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    rank = os.environ["RANK"]
    path = Path(config.run.logs_dir) / f"{config.run.run_name}_train_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
