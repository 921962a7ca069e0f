"""The demo's untrained model taught by a trained one, in sampled tokens, next to GRPO's.

    python benchmarks/distill.py --teacher output/demo/policy/000050

The run has the demo's flags, with `--advantage_estimator opd` in place of rewards, and trains on each
record twice, since sampled tokens are what counts. Its teacher is killed with SIGKILL in the middle,
and started again. `grpo` is taken from demo.json; its teacher's own training is not part of the tokens
that distillation needs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from harness.processes import ROOT
from harness.results import RESULTS, keep, machine, parser, setting, stored

FLAGS = {
    "config": ROOT / "assets/demo/grpo.yaml",
    "run_name": "distill",
    "advantage_estimator": "opd",
    "teachers": "trained",
    "max_trained_count": 2,
    "learning_rate": 0.0003,
    "eval_strategy": "steps",
}

SEARCHED = ("max_trained_count", "learning_rate")
"""Flags of which runs with other values are in the file, too."""


def started(command: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a command of agentrl."""
    return subprocess.Popen([sys.executable, "-m", "agentrl", command, *words], cwd=ROOT)


def num_steps(folder: Path) -> int:
    """Return how many steps the run has made; -1 before its start."""
    path = folder / "output/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else None
    return -1 if lines is None else sum("reward_mean" in line for line in lines)


def distilled(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run the distillation, and return its summary."""
    flags = FLAGS | {
        "output_dir": folder / "output",
        "logs_dir": folder / "logs",
        "mongo_data_dir": folder / "mongo",
        "max_steps": given.steps,
        "eval_steps": given.eval_steps,
        "seed": given.seed,
        **dict(given.set),
    }
    teach = ("teach", str(folder / "output"), "--teacher", f"trained={given.teacher.resolve()}")
    run = started(
        "run", *(str(word) for name, value in flags.items() for word in (f"--{name}", value))
    )
    teacher: subprocess.Popen[bytes] | None = None
    is_first = True
    try:
        while run.poll() is None:
            done = num_steps(folder)
            if teacher is None and done >= 0:
                teacher = started(*teach)
            elif teacher is not None and is_first and done >= given.steps // 2:
                teacher.kill()
                teacher.wait()
                teacher, is_first = started(*teach), False
            time.sleep(0.2)
    finally:
        for process in (teacher, run):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait()
    if run.returncode != 0:
        raise SystemExit("the run failed")
    found: dict[str, Any] = json.loads((folder / "output/summary.json").read_text())
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run, beside GRPO's tokens."""
    about = machine()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        summary = distilled(Path(name), given)
    wall_seconds = time.monotonic() - began
    sampled = summary["tokens"]["sampled"]
    return {
        "seed": given.seed,
        "settings": {name: FLAGS[name] for name in SEARCHED} | dict(given.set),
        "steps": summary["steps"],
        "held_out": {str(one["version"]): one["reward_mean"] for one in summary["evals"]},
        "tokens_sampled": sampled,
        "share_of_grpos_tokens": round(sampled / tokens_of_grpo(), 4),
        "seconds": round(wall_seconds, 1),
        "machine": about,
    }


def tokens_of_grpo() -> float:
    """Return the mean of the tokens that GRPO samples on the demo."""
    runs = json.loads((RESULTS / "demo.json").read_text())["grpo"]["runs"].values()
    return float(mean(run["tokens"]["sampled"] for run in runs))


def main() -> None:
    """Make a run, and add its figures to the file."""
    flags = parser(__doc__, "distill")
    flags.add_argument("--teacher", type=Path, required=True, help="directory of a trained model")
    flags.add_argument("--steps", type=int, default=38)
    flags.add_argument("--eval_steps", type=int, default=19)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    given = flags.parse_args()
    row = measure(given)
    keep(given.out, {"runs": [*stored(given.out).get("runs", []), row]})


if __name__ == "__main__":
    main()
