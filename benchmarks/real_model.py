"""Trains a pretrained model as a user would, with `assets/demo/smol.yaml`, and writes what came of it.

    python benchmarks/real_model.py --seeds 1 2 3
    python benchmarks/real_model.py --seeds 1 --no-control --picture assets/demo/smol.png

Each seed is one command: demonstrations are made, the model is fine-tuned on them, and trained by GRPO
on real rollouts. The control has learning rate 0 and starts from the fine-tuned model of the first
seed. Results of other devices and seeds stay in the file.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from demo import ROOT, WINDOW, draw, play

DEMO = "smol"


def device() -> str:
    """Return the name of the device that trains and samples."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{torch.get_num_threads()} CPU cores"


def tuned(folder: Path, name: str) -> dict[str, Any]:
    """Return the figures of a run's warm start."""
    summary = json.loads((folder / f"{name}-warm/summary.json").read_text())
    return {
        "sft_loss": [round(summary["loss"][0], 4), round(summary["loss"][-1], 4)],
        "sft_seconds": summary["seconds"]["total"],
        "sft_steps": summary["steps"],
    }


def summarized(runs: dict[str, dict[str, Any]], control: dict[str, Any] | None) -> dict[str, Any]:
    """Return the figures of a device: means over the seeds."""
    every = list(runs.values())
    return {
        "seconds": round(mean(run["wall_seconds"] for run in every), 1),
        "sft_loss": [round(mean(run["sft_loss"][end] for run in every), 4) for end in (0, 1)],
        "reward_first5": round(mean(run["reward_first_5"] for run in every), 4),
        "reward_last5": round(mean(run["reward_last_5"] for run in every), 4),
        "control_first5": None if control is None else control["reward_first_5"],
        "control_last5": None if control is None else control["reward_last_5"],
        "tokens_per_second": round(mean(run["tokens_per_second"]["sampled"] for run in every), 1),
        "runs": runs,
        "control_learning_rate_0": control,
    }


def main() -> None:
    """Run everything; write JSON and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--control-steps", type=int, default=3 * WINDOW)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/real_model.json")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags of each run")
    arguments = parser.parse_args()
    stored = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    before = stored.get(device(), {})
    runs, control = before.get("runs", {}), before.get("control_learning_rate_0")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in arguments.seeds:
            run = f"seed{seed}"
            found = play(folder, DEMO, run, "--seed", str(seed), *arguments.flags)
            runs[str(seed)] = found | tuned(folder, run)
            stored[device()] = summarized(runs, control)
            arguments.out.write_text(json.dumps(stored, indent=1) + "\n")
        if not arguments.no_control:
            # The same start as the first seed, so that only the learning rate differs.
            (folder / "control-warm").symlink_to(folder / f"seed{arguments.seeds[0]}-warm")
            steps = str(arguments.control_steps)
            flags = ["--learning_rate", "0", "--max_steps", steps, "--eval_strategy", "no"]
            control = play(folder, DEMO, "control", "--seed", "1", *flags, *arguments.flags)
        versions = json.loads(next(folder.glob("seed*/summary.json")).read_text())["versions"]
    stored[device()] = summarized(runs, control) | {"versions": versions}
    arguments.out.write_text(json.dumps(stored, indent=1) + "\n")
    if arguments.picture is not None:
        draw(arguments.picture, runs, control)
    print(json.dumps({key: value for key, value in stored[device()].items() if key != "runs"}))


if __name__ == "__main__":
    main()
