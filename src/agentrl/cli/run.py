"""`agentrl run`."""

import asyncio
import os
import sys
from collections.abc import Sequence

from agentrl.config.flags import canonical_name
from agentrl.config.loading import parse_flags
from agentrl.config.sections import RootConfig

DEMO_CONFIG = "assets/demo/grpo.yaml"
_TRAINS_SOMETHING = {"config", "model_name_or_path", "train_file", "db_connection_string"}


def main(argv: Sequence[str]) -> int:
    """Train on this machine, all processes included; on a further machine, ranks only."""
    config = parse_flags(argv)
    if _is_demo(argv, config):
        sys.stderr.write(f"note: no model and no questions given; this is --config {DEMO_CONFIG}\n")
        config = parse_flags(["--config", DEMO_CONFIG, *argv])
    from agentrl.launcher.multi_node import join_training
    from agentrl.launcher.run import run_training

    train = join_training if config.trainer.machine_rank else run_training
    return asyncio.run(train(config))


def _is_demo(argv: Sequence[str], config: RootConfig) -> bool:
    """Whether a command line names nothing of the user's to train: no model, questions or database.

    A private database without an output directory holds questions that were added by hand.
    """
    flags = {canonical_name(word.partition("=")[0]) for word in argv if word.startswith("--")}
    if flags & _TRAINS_SOMETHING or "MONGODB_URI" in os.environ:
        return False
    return config.run.output_path.exists() or not config.private_mongo_dir.exists()
