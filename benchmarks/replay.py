"""The demo's trainer with and without merged prefixes, on the same records.

    python benchmarks/replay.py --seeds 1 2 3

For each seed, the demo runs for some steps. Then trainers with other consumer names follow: each
starts from the demo's model and trains on the run's stored records, once with token trees, once
merged within a record, once with every turn in a separate row. All run the same steps on the same
records; only the time and the last digits differ.

`speedup.tree` is the time of `forward_backward` and `optimizer` of `none` over that of `tree`, wall
clock, summed over all seeds' steps except each one's first (which loads libraries). `largest_*` is
the largest relative difference of losses and gradient norms over all steps, and of weights after
the last one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness.processes import ROOT
from harness.results import parser, report
from safetensors.torch import load_file

from agentrl.store.private_mongod import EmbeddedMongo

MERGES = ("tree", "none")
ALL_SAMPLES = 10**6
"""Staleness bound of trainers that follow: their versions lag behind the samples."""


def agentrl(command: str, folder: Path, run: str, **flags: object) -> None:
    """Run a command of agentrl with the demo's configuration."""
    words = [command, "--config", str(ROOT / "assets/demo/grpo.yaml"), "--run_name", run]
    settings = {"logs_dir": folder / "logs", "eval_strategy": "no", **flags}
    for name, value in settings.items():
        words += [f"--{name}", str(value)]
    subprocess.run([sys.executable, "-m", "agentrl", *words], cwd=ROOT, check=True)


def replayed(folder: Path, seed: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Run the demo; return the metrics of every step of every following trainer."""
    data_dir, run = folder / "mongo", f"seed{seed}"
    common = {"seed": seed, "max_steps": steps}
    agentrl("run", folder, run, output_dir=folder / "played", mongo_data_dir=data_dir, **common)
    found = {}
    with EmbeddedMongo(data_dir) as mongo:
        following = {
            **common,
            "db_connection_string": mongo.uri(run),
            "enable_sampling": "false",
            "max_staleness": ALL_SAMPLES,
        }
        for merge in MERGES:
            own = {"output_dir": folder / merge, "consumer": f"replay_{merge}", "merge": merge}
            agentrl("train", folder, run, **own, **following)
            found[merge] = step_metrics(folder / merge)
    return found


def step_metrics(output: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step of a trainer."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def seconds(steps: list[dict[str, Any]]) -> float:
    """Return the trainer's compute seconds, without the first step."""
    phases = ("forward_backward", "optimizer")
    return float(sum(step["seconds"][phase] for step in steps[1:] for phase in phases))


def largest(found: dict[str, list[dict[str, Any]]], name: str) -> float:
    """Return the largest relative difference of a metric from that of separate turns."""
    return float(
        max(
            abs(step[name] - other[name]) / abs(other[name])
            for merge in MERGES
            for step, other in zip(found[merge], found["none"], strict=True)
        )
    )


def weight_difference(folder: Path) -> float:
    """Return the difference of the last weights, relative to their distance from the start."""
    merged, separate = (weights(folder / merge) for merge in ("tree", "none"))
    start = load_file(ROOT / "assets/demo/model/model.safetensors")
    apart = sum(float((merged[k] - separate[k]).double().square().sum()) for k in merged)
    come = sum(float((separate[k] - start[k]).double().square().sum()) for k in merged)
    return float((apart / come) ** 0.5)


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Return the newest policy that a trainer wrote."""
    newest = max(output.glob("policy/*/model.safetensors"), key=lambda path: path.stat().st_mtime)
    return load_file(newest)


def compared(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all seeds."""
    runs: dict[str, Any] = {}
    totals = dict.fromkeys(MERGES, 0.0)
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as name:
            found = replayed(Path(name), seed, given.steps)
            difference = weight_difference(Path(name))
        spent = {merge: seconds(steps) for merge, steps in found.items()}
        totals = {merge: totals[merge] + spent[merge] for merge in MERGES}
        runs[str(seed)] = {
            "steps": len(found["tree"]),
            "seconds": {merge: round(number, 3) for merge, number in spent.items()},
            "tokens": {
                merge: sum(step["num_forward_tokens"] for step in steps)
                for merge, steps in found.items()
            },
            "reward_mean": [step["reward_mean"] for step in found["tree"]],
            "largest_loss_difference": largest(found, "loss"),
            "largest_grad_norm_difference": largest(found, "grad_norm"),
            "largest_weight_difference": difference,
        }
    speedup = {merge: round(totals["none"] / totals[merge], 3) for merge in MERGES}
    return {"speedup": speedup, "runs": runs}


if __name__ == "__main__":
    flags = parser(__doc__, "replay")
    flags.add_argument("--steps", type=int, default=8)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    report(flags, compared)
