"""`agentrl sft`."""

import os
from collections.abc import Sequence
from contextlib import ExitStack

from agentrl.cli.train import log_by_rank
from agentrl.cli.uri import served_uri
from agentrl.config.loading import parse_flags
from agentrl.runtime.signals import INTERRUPTED


def main(argv: Sequence[str]) -> int:
    """Fine-tune; under torchrun or accelerate launch this is one rank of several."""
    config = parse_flags(argv)
    log_by_rank(config)
    with ExitStack() as stack:
        uri = None
        if config.data.records_of is not None and os.environ.get("RANK", "0") == "0":
            run = config.run.model_copy(update={"run_name": config.data.records_of})
            uri = stack.enter_context(served_uri(config.model_copy(update={"run": run})))
        from agentrl.trainer.sft.sft_process import fine_tune

        result = fine_tune(config, uri)
    if result is not None:
        print(f"{result.status} after step {result.step}; the model is in {result.model_path}")
    return INTERRUPTED if result is not None and result.status == "stopped" else 0
