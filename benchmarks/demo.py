"""Runs a demo on several seeds, and once with learning rate 0, and writes the results.

    python benchmarks/demo.py --seeds 1 2 3 --out benchmarks/results/demo.json \
        --picture assets/demo/reward.png
    python benchmarks/demo.py --demo hybrid
    python benchmarks/demo.py --demo vision --seeds 1 --no-control

Figures of `hybrid` and `vision` are stored under their names in the same file; results of other
seeds are kept. Every run is the whole system, started by `agentrl run` as `grpo_example.sh` starts
it. Per run: rewards, seconds by phase, tokens and samples per second, the share of the trainer's
wall time spent waiting for samples, and the share of the samplers' wall time spent waiting for
admission, that is, for new weights.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

ROOT = Path(__file__).parents[1]
WINDOW = 5
COLORS = ("#1f5fa8", "#d9730d", "#2e7d5b", "#8e4ec6")
GREY = "#9aa4b2"


DEMOS = ("grpo", "hybrid", "vision")
"""Configurations in assets/demo; the first is the one that starts without flags."""


def play(folder: Path, demo: str, name: str, *flags: str) -> dict[str, Any]:
    """Run a demo once and return its figures."""
    words = ["--run_name", name, "--config", str(ROOT / f"assets/demo/{demo}.yaml")]
    words += ["--output_dir", str(folder / name), "--logs_dir", str(folder / "logs")]
    words += ["--mongo_data_dir", str(folder / "mongo" / name), *flags]
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "agentrl", "run", *words], cwd=ROOT, check=True)
    wall_seconds = time.monotonic() - started
    summary = json.loads((folder / name / "summary.json").read_text())
    waits = asyncio.run(sampler_waits(folder / "mongo" / name, name))
    return figures(summary, waits, wall_seconds)


async def sampler_waits(data_dir: Path, database: str) -> dict[str, float]:
    """Return the samplers' mean share of wall time spent waiting, by reason."""
    with EmbeddedMongo(data_dir) as mongo:
        async with TrajectoryStore.connect(mongo.uri(database)) as store:
            samplers = await store.samplers.all()
    shares: dict[str, float] = {}
    for sampler in samplers:
        alive = (sampler.heartbeat_at - sampler.started_at).total_seconds()
        for reason, seconds in sampler.seconds_waiting.items():
            shares[reason] = shares.get(reason, 0.0) + seconds / alive / len(samplers)
    return {reason: round(share, 4) for reason, share in shares.items()}


def figures(
    summary: dict[str, Any], waits: dict[str, float], wall_seconds: float
) -> dict[str, Any]:
    """Return the stored figures of one run."""
    rewards = [reward for reward in summary["reward_mean"] if reward is not None]
    seconds, tokens = summary["seconds"], summary["tokens"]
    training = sum(seconds[phase] for phase in seconds if phase not in ("total", "eval"))
    return {
        "reward_mean": [
            None if reward is None else round(reward, 4) for reward in summary["reward_mean"]
        ],
        "reward_first_5": round(mean(rewards[:WINDOW]), 4),
        "reward_last_5": round(mean(rewards[-WINDOW:]), 4),
        "reward_gain": round(mean(rewards[-WINDOW:]) - mean(rewards[:WINDOW]), 4),
        "eval_reward": summary["eval_reward"],
        "steps": summary["steps"],
        "wall_seconds": round(wall_seconds, 1),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": {
            "sampled": round(tokens["sampled"] / training, 1),
            "trained_flat": round(
                tokens["forward_without_merging"] / seconds["forward_backward"], 1
            ),
        },
        "samples_per_second": round(summary["records"]["consumed"] / training, 2),
        "trainer_share_waiting_for_samples": round(seconds["wait_samples"] / training, 4),
        "sampler_share_waiting": waits,
        "staleness": summary["staleness"],
        "dropped": summary["dropped"],
    }


def draw(path: Path, runs: dict[str, dict[str, Any]], control: dict[str, Any] | None) -> None:
    """Draw the learning curves of all seeds, and of the control with learning rate 0."""
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    curves = [
        (f"seed {seed}", run, color)
        for (seed, run), color in zip(runs.items(), COLORS, strict=False)
    ]
    if control is not None:
        curves.append(("learning rate 0", control, GREY))
    for label, run, color in curves:
        points = [(i, r) for i, r in enumerate(run["reward_mean"], 1) if r is not None]
        steps, rewards = [p[0] for p in points], [p[1] for p in points]
        means = [mean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]
        axes.plot(steps, rewards, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, means, color=color, linewidth=2.2, label=label)
    axes.set(
        xlabel="optimizer step", ylabel=f"mean reward (thick: mean of {WINDOW} steps)", ylim=(0, 1)
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=130)


def merged(stored: dict[str, Any], demo: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a file's content with a demo's new figures merged in."""
    before = stored if demo == DEMOS[0] else stored.get(demo, {})
    now = {
        **before,
        **found,
        "runs": {**before.get("runs", {}), **found["runs"]},
        "control_learning_rate_0": found["control_learning_rate_0"]
        or before.get("control_learning_rate_0"),
    }
    return now if demo == DEMOS[0] else {**stored, demo: now}


def main() -> None:
    """Run everything; write JSON and picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", choices=DEMOS, default=DEMOS[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument(
        "--no-control", action="store_true", help="skip the run with learning rate 0"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/demo.json")
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, demo = Path(name), arguments.demo
        runs = {
            str(seed): play(folder, demo, f"seed{seed}", "--seed", str(seed))
            for seed in arguments.seeds
        }
        control = None
        if not arguments.no_control:
            control = play(folder, demo, "control", "--learning_rate", "0", "--seed", "1")
        a_run = next(folder.glob("*/summary.json"))
        versions = json.loads(a_run.read_text())["versions"]
    result = {
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "versions": versions,
        "runs": runs,
        "control_learning_rate_0": control,
    }
    stored = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    stored = merged(stored, demo, result)
    arguments.out.write_text(json.dumps(stored, indent=1) + "\n")
    if arguments.picture is not None:
        results = stored if demo == DEMOS[0] else stored[demo]
        draw(arguments.picture, results["runs"], results["control_learning_rate_0"])
    for label, run in (*runs.items(), ("lr 0", control)):
        if run is not None:
            print(
                f"{label}: {run['reward_first_5']:.3f} -> {run['reward_last_5']:.3f} "
                f"(gain {run['reward_gain']:+.3f}), held-out {run['eval_reward']}, "
                f"{run['wall_seconds']:.0f} s"
            )


if __name__ == "__main__":
    main()
