"""`agentrl sft`."""

import os
from contextlib import ExitStack
from typing import Any

import click

from agentrl.cli.databases import served_uri
from agentrl.cli.one_rank import log_by_rank, refuse_placement_flags
from agentrl.config.command_line import FlagCommand
from agentrl.config.sections import RootConfig
from agentrl.config.validation.checks import check_fine_tuning
from agentrl.errors import ConfigError
from agentrl.runtime.processes.memory import frozen_imports
from agentrl.runtime.processes.signals import INTERRUPTED


class _SftCommand(FlagCommand):
    """Accepts `--loss_calculater CrossEntropy`, the original's way to select fine-tuning."""

    def invoke(self, ctx: click.Context) -> Any:
        loss = ctx.params.pop("loss_calculator", None)
        if loss is not None and loss.upper() != "CROSSENTROPY":
            raise ConfigError(
                f"--loss_calculator {loss}: supervised fine-tuning supports only cross-entropy"
            )
        return super().invoke(ctx)


@click.command(
    "sft", cls=_SftCommand, sections=("run", "model", "store", "data", "algorithm", "trainer")
)
@click.pass_context
def sft(context: click.Context, config: RootConfig) -> int:
    """Fine-tune on conversations, or on the records of a run.

    Conversations (--train_file, --eval_file) are objects with `messages` in OpenAI form and
    optionally `tools`; see docs/sft.md. Under `accelerate launch` or `torchrun` this is one rank of
    several.
    """
    refuse_placement_flags(context)
    check_fine_tuning(config.data)
    _check_conversations(config)
    log_by_rank(config.run)
    with ExitStack() as stack:
        uri = None
        if config.data.records_of is not None and os.environ.get("RANK", "0") == "0":
            source = config.run.model_copy(update={"run_name": config.data.records_of})
            uri = stack.enter_context(served_uri(config.model_copy(update={"run": source})))
        with frozen_imports():
            from agentrl.plugins.sft.sft_process import fine_tune

        result = fine_tune(config, uri)
    if result is not None:
        print(f"{result.status} after step {result.step}; the model is in {result.model_path}")
    return INTERRUPTED if result is not None and result.status == "stopped" else 0


def _check_conversations(config: RootConfig) -> None:
    """Check output, model and data before importing the trainer, which takes longer than the check."""
    from agentrl.launcher.checks.preflight import check_folders
    from agentrl.models.checkpoints.resolve import resolve_model
    from agentrl.plugins.sft.demonstrations.demonstration import read_demonstrations

    check_folders({"output_dir": config.run.output_path})
    resolve_model(config.model.model_name_or_path, with_weights=False)
    for path in (config.data.train_file, config.data.eval_file):
        if path is not None:
            next(iter(read_demonstrations(path)), None)
