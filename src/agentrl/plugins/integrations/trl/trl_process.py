"""The TRL training process, `python -m agentrl.plugins.integrations.trl.trl_process`.

Arguments: trl.json, --config run.yaml.

Starts store, servers and samplers like `agentrl run`, and `GRPOTrainer` in a thread. No other
module imports this one, because it imports TRL.
"""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config.command_line import parse_flags
from agentrl.config.loading import flat_values
from agentrl.config.sections import RootConfig
from agentrl.datasets.question_files import load_questions
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.inference.weight_sync.version_files import version_dir
from agentrl.launcher.checks.preflight import check_inputs, check_name_is_free
from agentrl.launcher.cluster.local_cluster import LocalCluster, until_interrupted
from agentrl.models.checkpoints.resolve import resolve_model
from agentrl.plugins.integrations.trl.trl_rollouts import (
    RolloutFunction,
    reward_of_rollout,
    save_model,
)
from agentrl.rewards import MCPScorerFactory
from agentrl.runtime.atomic_directory import atomic_directory
from agentrl.runtime.processes.signals import INTERRUPTED
from agentrl.schema import Run
from agentrl.store import DEFAULT_CONSUMER
from agentrl.trainer.checkpoint import checkpoints_root
from agentrl.trainer.trainer_lease import trainer_lease


async def run(config: RootConfig, arguments: dict[str, Any]) -> int:
    """Train to completion; return the exit status.

    Raises:
        ConfigError: TRL rejects an argument; nothing was started.
        AgentRLError: a child process failed, or nothing could be learned.
    """
    await check_inputs(config)
    checked = await asyncio.to_thread(_grpo_config, arguments)
    async with LocalCluster(config) as running:
        store = await running.open_store()
        await check_name_is_free(running.config.run, store)
        status = await until_interrupted(_train(running, store, checked))
        return INTERRUPTED if status is None else status


def _grpo_config(arguments: dict[str, Any]) -> Any:
    # TRL warns on every use of a rollout function; its version is pinned.
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # Imported late: the import takes seconds, and errors in the flags are reported before it.
    trl = importlib.import_module("trl")
    try:
        return trl.GRPOConfig(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config: trl: {' '.join(str(error).split())}") from None


async def _train(running: LocalCluster, store: Any, checked: Any) -> int:
    config = running.config
    output = config.run.output_path
    await store.ensure_schema()
    await store.runs.create(Run(name=config.run.run_name))
    await store.runs.set_config(flat_values(config))
    await running.start_tool_server()
    running.write_config()
    await running.start_servers()
    await running.start_samplers()
    assert config.data.train_file is not None, "the engine checks this"
    questions = load_questions(config.data.train_file, config.data, MCPScorerFactory.check_question)
    publisher = PolicyPublisher(
        store, output / "policy", publish=config.publish, inference=config.inference
    )
    rollouts = RolloutFunction(store, publisher, questions, config.data.num_generations)
    model = str(resolve_model(config.model.model_name_or_path))
    lease_seconds = config.trainer.trainer_lease_seconds
    async with trainer_lease(store, DEFAULT_CONSUMER, lease_seconds=lease_seconds):
        await store.runs.set_status("training")
        training = asyncio.to_thread(_train_in_thread, model, checked, rollouts, len(questions))
        try:
            trainer = await running.watch(training)
        finally:
            rollouts.end()
        step = int(trainer.state.global_step)
        target = version_dir(checkpoints_root(output), step)
        with atomic_directory(target) as staging:
            await asyncio.to_thread(save_model, trainer, staging / "model")
        await store.ledger.commit(DEFAULT_CONSUMER, step)
        await publisher.settle()
    summary = {
        "run": config.run.run_name,
        "status": "completed",
        "steps": step,
        "reward_mean": rollouts.reward_means,
        "log": trainer.state.log_history,
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    await store.runs.set_status("completed")
    await running.wait_for_samplers()
    Console().print(f"{step} steps; model and tokenizer are in {target / 'model'}", soft_wrap=True)
    return 0


def _train_in_thread(
    model: str, checked: Any, rollouts: RolloutFunction, num_questions: int
) -> Any:
    """Train, and return TRL's trainer."""
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    # TRL passes only the prompt to a rollout function. The prompt is therefore the question's
    # number; the returned ids are the model's actual input.
    names = [str(number) for number in range(num_questions)]
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward_of_rollout,
        args=checked,
        train_dataset=datasets.Dataset.from_dict({"prompt": names}),
        rollout_func=rollouts,
    )
    trainer.train()
    return trainer


def main(argv: Sequence[str]) -> int:
    """Run; return the exit status (2: usage error, 1: failure)."""
    arguments, *flags = argv
    try:
        config = parse_flags(flags)
        return asyncio.run(run(config, json.loads(Path(arguments).read_text(encoding="utf-8"))))
    except AgentRLError as error:
        sys.stderr.write(f"agentrl trl: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
