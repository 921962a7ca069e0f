"""`agentrl eval`."""

import asyncio
from collections.abc import Sequence

from agentrl.config.flags import canonical_name
from agentrl.config.loading import parse_flags


def main(argv: Sequence[str]) -> int:
    """Score a checkpoint: the run's newest, unless another model is named on the command line."""
    config = parse_flags(argv)
    from agentrl.launcher.evaluation_run import newest_checkpoint, run_evaluation

    flags = {canonical_name(word.partition("=")[0]) for word in argv if word.startswith("--")}
    is_named = "model_name_or_path" in flags
    checkpoint = None if is_named else newest_checkpoint(config.run.output_path)
    return asyncio.run(run_evaluation(config, checkpoint))
