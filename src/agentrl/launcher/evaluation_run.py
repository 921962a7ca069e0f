"""`agentrl eval`: a checkpoint's score on held-out questions, from real rollouts, on one machine.

The evaluation is a separate run (`RUN_NAME-eval`), so its documents and weights stay separate
from those of a training run.
"""

import asyncio
import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.config.atomic_file import write_atomically
from agentrl.config.loading import flat_values
from agentrl.config.sections import ModelSection, RootConfig
from agentrl.datasets.task_stream import eval_tasks
from agentrl.errors import ConfigError, StoreError
from agentrl.evaluation.eval_scores import EvalMetrics
from agentrl.evaluation.held_out import evaluate
from agentrl.inference.weight_sync import AdapterNames
from agentrl.inference.weight_sync.version_files import weight_bytes
from agentrl.launcher.cluster.local_cluster import LocalCluster, until_interrupted
from agentrl.launcher.console.progress_display import QUIET_SECONDS, RunWarnings
from agentrl.launcher.console.run_panel import duration
from agentrl.launcher.console.run_report import (
    print_inspection_commands,
    report_if_slow,
    run_console,
    say,
)
from agentrl.launcher.start import announced_start
from agentrl.models.checkpoints.adapter_files import is_adapter, read_shape
from agentrl.rewards import MCPScorerFactory
from agentrl.runtime.installation import typed_command
from agentrl.runtime.printable import counted
from agentrl.runtime.processes.signals import INTERRUPTED
from agentrl.schema import Policy, Run
from agentrl.store import TrajectoryStore

FIRST_PAUSE_SECONDS = 10.0
"""Pause before the first progress line; the pauses double up to `QUIET_SECONDS`."""


def newest_checkpoint(output_path: Path) -> Path:
    """Return the model directory of a run's newest checkpoint, or that of its adapter."""
    found = sorted((output_path / "checkpoints").glob("[0-9]*/model/*config.json"))
    if not found:
        raise ConfigError(
            f"{output_path} contains no checkpoint; give --model_name_or_path, or train first"
        )
    return found[-1].parent


async def run_evaluation(config: RootConfig, checkpoint: Path | None) -> int:
    """Start everything, run the questions, print and write the score; return the exit status."""
    if not config.data.has_held_out:
        raise ConfigError("an evaluation needs --eval_file or --eval_env")
    if checkpoint is not None:
        config = config.model_copy(update={"model": serving(config.model, checkpoint)})
    adapter = checkpoint if checkpoint is not None and is_adapter(checkpoint) else None
    console = run_console()
    start = await announced_start(console, config, trains=False)
    config, gpus = start.config, start.gpus
    output = config.run.output_path
    if adapter is not None:
        roots = (*config.inference.weight_roots, adapter.absolute())
        inference = config.inference.model_copy(update={"weight_roots": roots})
        config = config.model_copy(update={"inference": inference})
    config = named_evaluation(config)
    async with LocalCluster(config, gpus=gpus, role="eval") as cluster:
        status = await until_interrupted(_evaluate(console, cluster, output / "eval.json", adapter))
        return INTERRUPTED if status is None else status


def named_evaluation(config: RootConfig) -> RootConfig:
    """Return the configuration of a run's evaluation, whose database is found by its own name."""
    run, store = config.run, config.store
    name = f"{run.run_name}-eval"
    if store.mongo_data_dir is not None and store.mongo_data_dir.name == run.run_name:
        store = store.model_copy(update={"mongo_data_dir": store.mongo_data_dir.with_name(name)})
    run = run.model_copy(update={"run_name": name, "output_dir": run.output_path})
    return config.model_copy(update={"run": run, "store": store})


def serving(model: ModelSection, checkpoint: Path) -> ModelSection:
    """Return the model section with which servers serve a checkpoint, model or adapter."""
    if not is_adapter(checkpoint):
        return model.model_copy(update={"model_name_or_path": str(checkpoint)})
    shape = read_shape(checkpoint)
    return model.model_copy(
        update={
            "model_name_or_path": shape.base,
            "lora_rank": shape.rank,
            "lora_alpha": shape.alpha,
            "lora_target_modules": shape.target_modules,
        }
    )


async def _evaluate(
    console: Console, cluster: LocalCluster, result_path: Path, adapter: Path | None
) -> int:
    store = await cluster.open_store()
    config = cluster.config
    await store.ensure_schema()
    await store.runs.create(Run(name=config.run.run_name))
    await store.runs.set_config(flat_values(config))
    await store.runs.reopen()
    await store.runs.set_phase("evaluating")
    if adapter is not None:
        name = AdapterNames(config.run.run_name).of(0)
        await store.policies.publish(
            Policy(version=0, path=str(adapter), adapter=name, num_bytes=weight_bytes(adapter))
        )
    async with report_if_slow(console, "waiting for the tool server ..."):
        await cluster.start_tool_server()
    cluster.write_config()
    if config.agents.evaluated_route is None:
        await cluster.start_servers()
    await cluster.start_samplers()
    tasks = eval_tasks(config.data, 0, MCPScorerFactory.check_question)
    route = config.agents.evaluated_route
    model = route.model if route else str(adapter or config.model.model_name_or_path)
    say(console, f"{counted(len(tasks), 'question')} for {model}")
    follower = asyncio.create_task(follow(console, store))
    try:
        metrics = await cluster.watch(
            evaluate(
                store,
                tasks,
                step=0,
                version=0,
                reuse=False,
                timeout_seconds=config.trainer.eval_timeout_seconds,
                stop=asyncio.Event(),
            )
        )
    finally:
        follower.cancel()
    assert metrics is not None, "nothing sets the stop event"
    await store.runs.set_status("completed")
    result = {
        "model": model,
        "eval_file": str(config.data.eval_env or config.data.eval_file),
        "num_generations": config.data.eval_num_generations,
        "temperature": config.sampling.eval_temperature,
        **metrics.model_dump(mode="json", exclude={"version", "on_version"}),
    }
    result_path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(result_path, json.dumps(result, indent=2) + "\n")
    print_scores(console, metrics, cluster.config_path)
    say(console, f"  result          {result_path}")
    print_inspection_commands(console, config, cluster.config_path)
    return 0


def print_scores(console: Console, metrics: EvalMetrics, config_path: Path) -> None:
    """Print the scores, and the command that says why rollouts have none."""
    console.print(_table(metrics))
    console.print(
        f"mean reward [bold]{metrics.reward_mean:.3f}[/] over "
        f"{counted(metrics.num_tasks, 'question')}, "
        f"{counted(metrics.num_unscored, 'rollout')} without a score, {metrics.seconds:.1f} s"
    )
    if metrics.num_unscored:
        command = typed_command("inspect", "failures", "--config", str(config_path))
        say(console, f"  no score     {command}", "yellow")


async def follow(console: Console, store: TrajectoryStore) -> None:
    """Report progress of the evaluation, and warnings, until cancelled."""
    started, pause = time.monotonic(), FIRST_PAUSE_SECONDS
    warnings = RunWarnings(store)
    while True:
        await asyncio.sleep(pause)
        pause = min(2 * pause, QUIET_SECONDS)
        for text in await warnings.new():
            say(console, f"warning: {text}", "yellow")
        try:
            evaluations = await store.reports.evaluations()
        except StoreError:  # either the database recovers, or the evaluation itself fails
            continue
        for evaluation in evaluations[-1:]:
            answered = f"{evaluation.num_completed} of {evaluation.num_tasks} questions answered"
            say(console, f"{duration(time.monotonic() - started):>6}  {answered}")


def _table(metrics: EvalMetrics) -> Table:
    """Return the scores over all questions, by scorer and by tag."""
    assert metrics.total is not None, "an evaluation has a score"
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("questions", "tries", "mean", "95 %"):
        table.add_column(name, justify="right")
    for k in metrics.total.pass_at:
        table.add_column(f"pass@{k}", justify="right")
    rows = {"all": metrics.total}
    rows |= {f"scorer {name}": row for name, row in metrics.by_scorer.items()}
    rows |= {f"tag {name}": row for name, row in metrics.by_tag.items()}
    for name, row in rows.items():
        passes = (row.pass_at.get(k) for k in metrics.total.pass_at)
        table.add_row(
            Text(name),
            str(row.num_tasks),
            str(row.num_tries),
            f"{row.mean:.3f}",
            row.interval_text,
            *("-" if share is None else f"{share:.3f}" for share in passes),
        )
    return table
