"""The console of a run, and the launcher's messages on it: waiting, the result, and the reason for a failure.

The console outlives the reader of its output. A closed pipe (`| head`, a `tee` that Ctrl-C ended), a lost
terminal and a full disk end the output, and neither the run nor the orderly end of its processes.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console

from agentrl.config.atomic_file import write_atomically
from agentrl.config.sections import PRIVATE_MONGO_ROOT, RootConfig
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.runtime.installation import typed_command
from agentrl.runtime.printable import counted, printable
from agentrl.schema import Run
from agentrl.store import TrajectoryStore

SLOW_SECONDS = 5.0
"""How long the console may stay silent before the first process runs; most starts take less."""

logger = logging.getLogger(__name__)


def run_console() -> Console:
    """Return a console on standard output whose write errors are logged once, and not raised."""
    return Console(file=cast(TextIO, FailSafeOutput(sys.stdout)))


class FailSafeOutput:
    """A text stream that discards its text after the first write error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str, /) -> int:
        """Write the text, or discard it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or discard it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        # The buffer keeps the text of a failed write and writes it again, at exit at the latest.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        logger.warning(
            "standard output: %s; the run continues, and Ctrl-C or SIGTERM stops it", error.strerror
        )


def say(console: Console, text: str, style: str = "") -> None:
    """Print untrusted text; only the terminal wraps its lines, so that it can be copied intact."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


@asynccontextmanager
async def report_if_slow(console: Console, text: str) -> AsyncIterator[None]:
    """Report what is being waited for, if the block takes longer than `SLOW_SECONDS`."""

    async def report() -> None:
        await asyncio.sleep(SLOW_SECONDS)
        say(console, text)

    reporter = asyncio.create_task(report())
    try:
        yield
    finally:
        reporter.cancel()


def print_gpus(console: Console, gpus: GpuMap) -> None:
    """Print the assignment of GPUs to processes, if there are GPUs."""
    for name, text in gpus.rows():
        console.print(f"  {name:12} {text}", highlight=False, soft_wrap=True)


def add_to_summary(output_path: Path, values: Mapping[str, object]) -> None:
    """Replace values of the trainer's summary, if it wrote one, by what the launcher knows better."""
    path = output_path / "summary.json"
    if not path.exists():
        return
    summary = json.loads(path.read_text()) | dict(values)
    write_atomically(path, json.dumps(summary, indent=2) + "\n")


async def print_missing_scores(
    console: Console, config: RootConfig, store: TrajectoryStore
) -> None:
    """Print how many records a scorer's defect left without a score, and how to repair them."""
    missing = await store.reports.missing_scores()
    if missing.num_unscorable:
        path = f"{config.run.output_path}/config.yaml"
        command = typed_command("store", "rescore", "--scorer", "NAME", "--config", path)
        say(
            console,
            f"no score for {counted(missing.num_unscorable, 'record')}, because the scorer failed; "
            f"for example {missing.unscorable}\n  after fixing it: {command}",
            "yellow",
        )


def finished(config: RootConfig, seconds: float) -> str:
    """Return a message that training ended, at its last step or when the questions were used up."""
    path = config.run.output_path / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    skipped, steps = summary.get("skipped_last", 0), summary.get("steps", 0)
    note = (
        f"; the last {counted(skipped, 'step')} changed nothing, because loss or gradient was not "
        f"finite: the weights are those of step {steps - skipped} (see `skipped` in metrics.jsonl)"
        if skipped
        else ""
    )
    if summary.get("status") != "data_ended":
        return f"finished in {seconds:.0f} s{note}"
    epochs = config.data.num_train_epochs
    hint = (
        "add some with `agentrl tasks add`"
        if config.data.train_file is None
        else f"--num_train_epochs {2 * epochs} repeats them"
    )
    return (
        f"finished in {seconds:.0f} s, after step {summary.get('steps')} of "
        f"{config.trainer.max_steps}: all questions were used; {hint}{note}"
    )


def interrupted(seconds: float, run: Run | None) -> str:
    """Return a message that a run was stopped, and what its next start computes again."""
    text = (
        f"interrupted after {seconds:.0f} s; all data is kept, and the same command resumes the run"
    )
    if run is None:
        return text
    if run.step <= run.saved_step:
        if run.phase != "training":
            return text
        return f"{text}; step {run.step + 1} was not finished and will be computed again"
    steps = f"step {run.saved_step + 1}"
    if run.step > run.saved_step + 1:
        steps = f"steps {run.saved_step + 1} to {run.step}"
    return (
        f"{text}; {steps} had no checkpoint yet and will be computed again from the stored rollouts"
    )


def print_locations(console: Console, config: RootConfig, store: TrajectoryStore) -> None:
    """Print the result and the locations of the run's logs, files and database."""
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
    for name, location in rows:
        say(console, f"  {name:15} {location}")
    print_inspection_commands(console, config)


def print_inspection_commands(
    console: Console, config: RootConfig, config_path: Path | None = None
) -> None:
    """Print the commands that inspect the run: by its name, if its database lies where a name leads."""
    name, section = config.run.run_name, config.store
    is_private = section.db_connection_string is None or section.mongo_data_dir is not None
    here = (PRIVATE_MONGO_ROOT / name).absolute()
    is_named = is_private and config.private_mongo_dir.absolute() == here
    path = config_path or config.run.output_path / "config.yaml"
    selection = ("--run_name", name) if is_named else ("--config", str(path))
    commands = [
        ("inspect it", typed_command("inspect", "progress", *selection)),
        ("in a browser", typed_command("ui", *selection)),
    ]
    if is_private:
        store_up = typed_command("store", "up", "--show_password", *selection)
        commands.append(("in Compass", f"{store_up}  (paste the connection string that it prints)"))
    for purpose, command in commands:
        say(console, f"  {purpose:15} {command}")


def _print_result(console: Console, summary: dict[str, object]) -> None:
    rewards = _numbers(summary.get("reward_mean"))
    if len(rewards) >= 2:
        window = min(5, len(rewards) // 2)
        first = sum(rewards[:window]) / window
        last = sum(rewards[-window:]) / window
        steps = "step" if window == 1 else f"{window} steps"
        console.print(
            f"mean reward {first:.3f} (first {steps}) -> [bold]{last:.3f}[/] (last {steps})"
        )
    evaluation = summary.get("eval_reward")
    if isinstance(evaluation, dict) and evaluation.get("after") is not None:
        before = evaluation.get("before")
        before_text = "-" if before is None else f"{before:.3f}"
        console.print(f"held-out reward {before_text} -> [bold]{evaluation['after']:.3f}[/]")


def _numbers(values: object) -> list[float]:
    """Return the numbers of a JSON list, without the nulls of steps that have no score."""
    return [v for v in values if isinstance(v, float | int)] if isinstance(values, list) else []
