"""Runs a demo on several seeds, and once with learning rate 0, and writes what came of it.

    python benchmarks/demo.py --seeds 1 2 3 --picture assets/demo/reward.png
    python benchmarks/demo.py --demo vision --seeds 1 --no-control
    python benchmarks/demo.py --demo smol --seeds 1 --picture docs/images/smol.png

The file has the figures of each demo under its name, and keeps results of other seeds. Every run is
the whole system, started by `agentrl run` as `grpo_example.sh` starts it. Per run: rewards, seconds by
phase, tokens and samples per second, the share of the trainer's wall time spent waiting for samples,
and the share of the samplers' wall time spent waiting for admission, that is, for new weights. For the
rollouts: seconds from claim to end, and from the first claim to the first group and the first step.

`smol` is a pretrained model: it is fine-tuned on demonstrations before it is trained. Its control starts
from the fine-tuned model of the first seed.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from harness.processes import ROOT
from harness.results import keep, machine, parser, stored
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.schema import Record, SamplerInfo
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

WINDOW = 5
COLORS = ("#1f5fa8", "#d9730d", "#2e7d5b", "#8e4ec6")
GREY = "#9aa4b2"
DEMOS = ("grpo", "hybrid", "vision", "smol")
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
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    trained_at = datetime.fromtimestamp(json.loads(rows[0])["time"], UTC)
    waits, rollouts = asyncio.run(sampling_of(folder / "mongo" / name, name, trained_at))
    found = figures(summary, waits, wall_seconds) | {"rollouts": rollouts}
    return found | tuned(folder / f"{name}-warm/summary.json")


def tuned(path: Path) -> dict[str, Any]:
    """Return the figures of a warm start, if there was one."""
    if not path.exists():
        return {}
    summary = json.loads(path.read_text())
    return {
        "sft_loss": [round(summary["loss"][0], 4), round(summary["loss"][-1], 4)],
        "sft_seconds": summary["seconds"]["total"],
        "sft_steps": summary["steps"],
    }


async def sampling_of(
    data_dir: Path, database: str, trained_at: datetime
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the samplers' waits, and figures of the training rollouts; see `main`.

    Args:
        data_dir: of the run's mongod, which has ended.
        database: name of the run.
        trained_at: when the first step was published.
    """
    with EmbeddedMongo(data_dir) as mongo:
        async with TrajectoryStore.connect(mongo.uri(database)) as store:
            samplers = await store.samplers.all()
            records = [record async for record in store.records.find(split="train")]
    return sampler_waits(samplers), rollout_figures(records, trained_at)


def rollout_figures(records: Sequence[Record], trained_at: datetime) -> dict[str, float]:
    """Return the seconds from claim to end, and to the first group and step, and the throughput."""
    ended = [(r.task_id, r.started_at, r.finished_at) for r in records]
    times = [(task, start, end) for task, start, end in ended if start and end]
    seconds = np.array([(end - start).total_seconds() for _, start, end in times])
    first = min(start for _, start, _ in times)
    sizes = Counter(record.task_id for record in records)
    groups: dict[str, list[datetime]] = defaultdict(list)
    for task, _, end in times:
        groups[task].append(end)
    complete = [max(ends) for task, ends in groups.items() if len(ends) == sizes[task]]
    whole = (max(end for _, _, end in times) - first).total_seconds()
    found = {
        "claim_to_end_median": np.median(seconds),
        "claim_to_end_p95": np.quantile(seconds, 0.95),
        "to_first_group": (min(complete) - first).total_seconds(),
        "to_first_step": (trained_at - first).total_seconds(),
        "sampled_tokens_per_second": sum(r.num_output_tokens for r in records) / whole,
        "rollouts_per_second": len(times) / whole,
    }
    return {name: round(float(value), 2) for name, value in found.items()}


def sampler_waits(samplers: Sequence[SamplerInfo]) -> dict[str, float]:
    """Return the samplers' mean share of wall time spent waiting, by reason."""
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


def main() -> None:
    """Run everything; write JSON and picture."""
    flags = parser(__doc__, "demo")
    flags.add_argument("--demo", choices=DEMOS, default=DEMOS[0])
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--no-control", action="store_true", help="no run with learning rate 0")
    flags.add_argument("--picture", type=Path)
    flags.add_argument("--flags", nargs="...", default=[], help="further flags of each run")
    given = flags.parse_args()
    about = machine()
    found = stored(given.out).get(given.demo, {"runs": {}, "control_learning_rate_0": None})
    found["machine"] = about
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in given.seeds:
            of_seed = ("--seed", str(seed), *given.flags)
            found["runs"][str(seed)] = play(folder, given.demo, f"seed{seed}", *of_seed)
            keep(given.out, {given.demo: found})
        if not given.no_control:
            warm = folder / f"seed{given.seeds[0]}-warm"
            if warm.exists():
                # The same start as the first seed, so that only the learning rate differs.
                (folder / "control-warm").symlink_to(warm)
            unlearning = ("--learning_rate", "0", "--seed", "1", *given.flags)
            control = play(folder, given.demo, "control", *unlearning)
            keep(given.out, {given.demo: found | {"control_learning_rate_0": control}})
    if given.picture is not None:
        drawn = stored(given.out)[given.demo]
        draw(given.picture, drawn["runs"], drawn["control_learning_rate_0"])


if __name__ == "__main__":
    main()
