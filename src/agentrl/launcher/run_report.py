"""The end of a run for a person: its result, the places of its files, and why it failed."""

import json
import re
from pathlib import Path

from rich.console import Console

from agentrl.config.sections import RootConfig
from agentrl.launcher.gpu_placement import GpuMap
from agentrl.runtime.child_processes import Child
from agentrl.store import TrajectoryStore

# What a command says to its user, or the last line of a traceback.
_ERROR = re.compile(r"(?:\[rank\d+\]: )?(agentrl \w+: .+|[\w.]*(?:Error|Exception): .+)")
_TAIL_LINES = 200


def last_error(child: Child) -> str:
    """Return the line of a failed child's log that gives the reason; the last line if none does.

    `accelerate launch` appends a report of its own, without a reason, to the ranks' output.
    """
    errors = [_ERROR.fullmatch(line) for line in child.log_tail(_TAIL_LINES).splitlines()]
    said = [error[1] for error in errors if error is not None]
    return said[-1] if said else child.log_tail(1)


def print_gpus(console: Console, gpus: GpuMap) -> None:
    """Print which process gets which GPUs, where there are any."""
    for name, words in gpus.rows():
        console.print(f"  {name:12} {words}", highlight=False, soft_wrap=True)


def add_restarts(output_path: Path, num_restarts: dict[str, int]) -> None:
    """Add to the trainer's summary how often each process was started again, where any was."""
    path = output_path / "summary.json"
    if not path.exists():
        return
    summary = json.loads(path.read_text()) | {"restarts": dict(sorted(num_restarts.items()))}
    staging = path.with_name(f".{path.name}.tmp")
    staging.write_text(json.dumps(summary, indent=2) + "\n")
    staging.replace(path)


async def print_missing_scores(
    console: Console, config: RootConfig, store: TrajectoryStore
) -> None:
    """Say how many records a defect of the scorer left without a score, and how to repair them."""
    missing = await store.reports.missing_scores()
    if missing.num_unscorable:
        console.print(
            f"{missing.num_unscorable} records have no score, as the scorer failed on them; such as "
            f"{missing.unscorable}\n  when it is mended: agentrl store rescore --scorer NAME "
            f"--config {config.run.output_path}/config.yaml",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def print_places(console: Console, config: RootConfig, store: TrajectoryStore) -> None:
    """Print the result and where the run's logs, files and database are."""
    output = config.run.output_path
    summary_path = output / "summary.json"
    if summary_path.exists():
        _print_result(console, json.loads(summary_path.read_text()))
    rows = [
        ("log files", f"{config.run.logs_dir}/{config.run.run_name}_*.log"),
        ("checkpoints", f"{output}/"),
        ("summary", str(summary_path)),
        ("picture", str(output / "reward.png")),
        ("database", store.redacted_uri),
    ]
    is_private = config.store.db_connection_string is None
    where = "" if is_private else " --db_connection_string ..."
    rows.append(("in a browser", f"agentrl ui --run_name {config.run.run_name}{where}"))
    for name, place in rows:
        console.print(f"  {name:12} {place}", highlight=False, soft_wrap=True)
    if is_private:
        console.print(
            f"  to look into it: agentrl store up --show_password --run_name {config.run.run_name}, "
            "then open the connection string in MongoDB Compass (New connection > paste > Connect)",
            highlight=False,
            soft_wrap=True,
        )


def _print_result(console: Console, summary: dict[str, object]) -> None:
    rewards = _numbers(summary.get("reward_mean"))
    if len(rewards) >= 2:
        window = min(5, len(rewards) // 2)
        first = sum(rewards[:window]) / window
        last = sum(rewards[-window:]) / window
        console.print(
            f"mean reward {first:.3f} (first {window} steps) -> [bold]{last:.3f}[/] "
            f"(last {window} steps)"
        )
    evaluation = summary.get("eval_reward")
    if isinstance(evaluation, dict) and evaluation.get("after") is not None:
        before = evaluation.get("before")
        shown = "-" if before is None else f"{before:.3f}"
        console.print(f"held-out reward {shown} -> [bold]{evaluation['after']:.3f}[/]")


def _numbers(values: object) -> list[float]:
    """Return the numbers of a JSON list; steps without a score have null there."""
    return [v for v in values if isinstance(v, float | int)] if isinstance(values, list) else []
