"""metrics.jsonl: a line for every optimizer step of a run, also the history that it resumes with.

eval_losses.jsonl holds the losses on held-out conversations of supervised fine-tuning.
"""

import json
import logging
from contextlib import suppress
from pathlib import Path

from agentrl.config.atomic_file import write_atomically
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.trainer.metrics.history import History, StepMetrics

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVAL_LOSSES_FILE = "eval_losses.jsonl"


def append_metrics(output_path: Path, metrics: StepMetrics) -> None:
    """Append a step's line to metrics.jsonl."""
    output_path.mkdir(parents=True, exist_ok=True)
    with (output_path / METRICS_FILE).open("a") as file:
        file.write(metrics.model_dump_json(exclude_none=True) + "\n")


def read_metrics(output_path: Path) -> dict[int, StepMetrics]:
    """Return step -> figures from metrics.jsonl; empty without the file."""
    path = output_path / METRICS_FILE
    lines = path.read_text().splitlines() if path.is_file() else []
    steps = [StepMetrics.model_validate_json(line) for line in lines]
    return {metrics.step: metrics for metrics in steps}


def metrics_until(output_path: Path, step: int) -> list[StepMetrics]:
    """Return the figures of the steps up to `step`; what cannot be read is named and left out."""
    path = output_path / METRICS_FILE
    found: dict[int, StepMetrics] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            metrics = StepMetrics.model_validate_json(line)
            found[metrics.step] = metrics
    num_missing = sum(number not in found for number in range(1, step + 1))
    if num_missing:
        logger.warning(
            "%s lacks the figures of %d of %d steps; the curves have gaps", path, num_missing, step
        )
    return [found[number] for number in sorted(found) if number <= step]


def append_eval_loss(output_path: Path, step: int, loss: float) -> None:
    """Append the loss on held-out conversations after a step to eval_losses.jsonl."""
    output_path.mkdir(parents=True, exist_ok=True)
    with (output_path / EVAL_LOSSES_FILE).open("a") as file:
        file.write(json.dumps({"step": step, "eval_loss": loss}) + "\n")


def eval_losses_until(output_path: Path, step: int) -> dict[int, float]:
    """Return step -> loss on held-out conversations, up to `step`; the last line of a step counts."""
    path = output_path / EVAL_LOSSES_FILE
    found: dict[int, float] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            values = json.loads(line)
            found[int(values["step"])] = float(values["eval_loss"])
    return {number: loss for number, loss in found.items() if number <= step}


def recorded_steps(config: RootConfig, first: int, last: int) -> dict[int, StepMetrics]:
    """Return the figures of a run's steps."""
    recorded = read_metrics(config.run.output_path)
    missing = next((step for step in range(first, last + 1) if step not in recorded), None)
    if missing is not None:
        raise ConfigError(
            f"step {missing} of {config.run.run_name} was not trained; it has steps 1 to "
            f"{max(recorded, default=0)}"
        )
    return recorded


def rewind_metrics(output_path: Path, history: History) -> None:
    """Rewrite metrics.jsonl to the steps that a resumed run builds on."""
    lines = [step.model_dump_json(exclude_none=True) + "\n" for step in history.steps]
    output_path.mkdir(parents=True, exist_ok=True)
    write_atomically(output_path / METRICS_FILE, "".join(lines))
