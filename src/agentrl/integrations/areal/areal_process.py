"""The process in which AReaL trains: `python -m agentrl.integrations.areal.areal_process WORKFLOW --config FILE`.

Imports AReaL, so nothing else imports it.
"""

import sys
from collections.abc import Sequence

from areal import PPOTrainer
from areal.api.cli_args import PPOConfig, load_expr_config
from datasets import Dataset


def main(argv: Sequence[str]) -> None:
    """Train.

    Args:
        argv: `module.Class` of the workflow, and AReaL's own arguments.
    """
    workflow, *words = argv
    config, _ = load_expr_config(words, PPOConfig)
    train = Dataset.from_json(config.train_dataset.path)
    held_out = config.valid_dataset
    arguments = {"gconfig": config.gconfig, "tokenizer": config.tokenizer_path}
    with PPOTrainer(
        config,
        train_dataset=train,
        valid_dataset=None if held_out is None else Dataset.from_json(held_out.path),
    ) as trainer:
        trainer.train(
            workflow=workflow,
            workflow_kwargs=arguments,
            eval_workflow=None if held_out is None else workflow,
            eval_workflow_kwargs={**arguments, "gconfig": config.eval_gconfig},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
