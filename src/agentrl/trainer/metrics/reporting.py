"""The files that report on a run as a whole: summary.json, merge_report.json, reward.png."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.config.atomic_file import atomic_file, write_atomically
from agentrl.trainer.learner.merge_check import MergeCheck
from agentrl.trainer.metrics.history import History
from agentrl.trainer.metrics.measures import num_skipped_last

SUMMARY_FILE = "summary.json"
PICTURE_FILE = "reward.png"
MERGE_REPORT_FILE = "merge_report.json"

_DISTRIBUTIONS = {"agentrl": "agentrl-mongo"} | {
    name: name for name in ("torch", "transformers", "pymongo", "mcp", "numpy")
}
_MEAN_WINDOW = 5
_BLUE, _ORANGE, _GRAY = "#1f5fa8", "#d9730d", "#9aa4b2"


def summarize(history: History, *, run_name: str, status: str) -> dict[str, Any]:
    """Return the run's summary as plain JSON values."""
    steps = history.steps
    staleness = history.staleness()
    num_stale = sum(staleness.values())
    before = history.eval_at(0)
    after = history.evals[-1] if history.evals and history.evals[-1] is not before else None
    return {
        "run": run_name,
        "status": status,
        "steps": len(steps),
        "skipped_last": num_skipped_last(history),
        "reward_mean": [step.reward_mean for step in steps],
        "reward_note": (
            "mean score of all scored records in the groups that a step consumed, including "
            "records that were then dropped (equal scores, staleness)"
        ),
        "eval_reward": {
            "before": before.reward_mean if before else None,
            "after": after.reward_mean if after else None,
        },
        "evals": [evaluation.model_dump(mode="json") for evaluation in history.evals],
        "tokens": {
            "sampled": sum(step.num_output_tokens for step in steps),
            "prompt": sum(step.num_prompt_tokens for step in steps),
            "trained": sum(step.num_trained_tokens for step in steps),
            "forward": sum(step.num_forward_tokens for step in steps),
            "forward_without_merging": sum(step.num_flat_tokens for step in steps),
        },
        "records": {
            "consumed": sum(step.num_records for step in steps),
            "trained": sum(step.num_trained_records for step in steps),
        },
        "groups": {"consumed": history.groups_consumed},
        "seconds": {phase: round(spent, 3) for phase, spent in sorted(history.seconds.items())},
        "staleness": {
            "mean": sum(key * count for key, count in staleness.items()) / num_stale
            if num_stale
            else None,
            "max": max(staleness) if staleness else None,
            "histogram": {str(key): count for key, count in staleness.items()},
        },
        "dropped": history.dropped(),
        "versions": {
            "policy": history.last_step,
            "python": platform.python_version(),
            **_library_versions(),
        },
    }


def write_summary(output_path: Path, summary: dict[str, Any]) -> Path:
    """Write summary.json atomically."""
    return _write_json(output_path / SUMMARY_FILE, summary)


def write_merge_report(output_path: Path, step: int, check: MergeCheck) -> Path:
    """Write merge_report.json atomically."""
    return _write_json(output_path / MERGE_REPORT_FILE, {"step": step, **check.to_json()})


def draw_rewards(output_path: Path, history: History, *, run_name: str) -> Path:
    """Draw the learning curve: reward per step, its running mean, and the evaluations."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = [
        (step.step, step.reward_mean) for step in history.steps if step.reward_mean is not None
    ]
    if points:
        _draw_steps(axes, points)
    if history.evals:
        axes.plot(
            [evaluation.version for evaluation in history.evals],
            [evaluation.reward_mean for evaluation in history.evals],
            linestyle="none",
            marker="D",
            markersize=8,
            color=_ORANGE,
            label="held-out evaluation",
            zorder=4,
        )
        for evaluation in history.evals:
            axes.annotate(
                f"{evaluation.reward_mean:.2f}",
                (evaluation.version, evaluation.reward_mean),
                textcoords="offset points",
                xytext=(0, 9),
                ha="center",
                color=_ORANGE,
            )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward")
    axes.set_title(f"{run_name}: reward over training")
    rewards = [reward for _, reward in points] + [
        evaluation.reward_mean for evaluation in history.evals
    ]
    lowest, highest = min([0.0, *rewards]), max([0.0, *rewards])
    # Headroom for the numbers above the evaluations.
    axes.set_ylim(lowest, highest + 0.12 * (highest - lowest or 1.0))
    axes.grid(visible=True, alpha=0.25)
    if points or history.evals:
        axes.legend(loc="lower right", frameon=False)
    path = output_path / PICTURE_FILE
    output_path.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as staging:
        figure.savefig(staging, format="png")
    return path


def _draw_steps(axes: Axes, points: list[tuple[int, float]]) -> None:
    steps = [step for step, _ in points]
    rewards = [reward for _, reward in points]
    means = [
        sum(window) / len(window)
        for position in range(len(rewards))
        if (window := rewards[max(0, position + 1 - _MEAN_WINDOW) : position + 1])
    ]
    axes.plot(steps, rewards, marker="o", markersize=3, color=_GRAY, linewidth=1, label="each step")
    axes.plot(steps, means, color=_BLUE, linewidth=2.2, label=f"mean of {_MEAN_WINDOW} steps")


def _write_json(path: Path, value: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, indent=2) + "\n")
    return path


def _library_versions() -> dict[str, str]:
    versions = {}
    for name, distribution in _DISTRIBUTIONS.items():
        try:
            versions[name] = version(distribution)
        except PackageNotFoundError:
            continue
    return versions
