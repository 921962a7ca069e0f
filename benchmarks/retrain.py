"""The demo with inverted scores, which are then taken back.

    python benchmarks/retrain.py                  # seeds 1, 2 and 3
    python benchmarks/retrain.py --seed 2 --again

A tenth of the scores between the samples of step 10 and those of step 20 is inverted. `held_out` has the
mean held-out scores of the demo as it is (`clean`), of the run with the inverted scores (`inverted`),
and of that run's steps made again without them (`retrained`): of each run, and over the seeds. `again`
says whether its steps with all records give its own weights, bit for bit.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from harness.processes import ROOT
from harness.results import keep, machine, parser, stored

SCORER = """
import os

from agentrl.rewards import MCPScorerFactory
from agentrl.rewards.factory import Verdict

COUNTED = {counted!r}
FIRST, LAST = {first}, {last}


@MCPScorerFactory.register_scorer("sometimes_inverted", needs_answer=True)
async def sometimes_inverted(answer, truth):
    value = float(any(answer.strip() == right.strip() for right in truth.accepted))
    with open(COUNTED, "ab") as file:
        file.write(b".")
        number = file.tell()
    if FIRST <= number < LAST and number % 10 == 0:
        return Verdict(1.0 - value, detail="inverted")
    return Verdict(value)
"""
RECORDS_PER_STEP = 16 * 8


def agentrl(folder: Path, command: str, *words: str) -> str:
    """Run a command in a folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", command, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def demo(folder: Path, name: str, *flags: str) -> float:
    """Train the demo; return its last held-out score."""
    config = ("--config", str(ROOT / "assets/demo/grpo.yaml"), "--mongo_port", "0")
    agentrl(folder, "run", *config, "--run_name", name, *flags)
    summary = json.loads((folder / f"output/{name}/summary.json").read_text())
    return float(summary["evals"][-1]["reward_mean"])


def measured(seed: int, steps: int) -> dict[str, Any]:
    """Train both runs, and make the steps of the second one again."""
    about = machine()
    with tempfile.TemporaryDirectory(prefix="agentrl-retrain-") as name:
        folder = Path(name)
        text = SCORER.format(
            counted=str(folder / "counted"),
            first=9 * RECORDS_PER_STEP,
            last=20 * RECORDS_PER_STEP,
        )
        (folder / "scorer.py").write_text(text)
        questions = (ROOT / "assets/demo/train.jsonl").read_text()
        inverted = questions.replace('"scorer": "exact"', '"scorer": "sometimes_inverted"')
        (folder / "train.jsonl").write_text(inverted)
        size = ("--max_steps", str(steps), "--save_total_limit", "99")
        common = ("--seed", str(seed), *size)
        own = ("--scorer_module", "scorer.py", "--train_file", "train.jsonl")
        held_out = {
            name: demo(folder, name, *common, *more)
            for name, more in (("clean", ()), ("inverted", own))
        }
        again = json.loads(agentrl(folder, "retrain", "inverted", "--run_name", "again", "--json"))
        last = f"checkpoints/{max(again['steps']):06}/model/model.safetensors"
        weights = [folder / "output" / name / last for name in ("inverted", "again")]
        is_equal = weights[0].read_bytes() == weights[1].read_bytes()
        started = time.monotonic()
        without = ("--without", "score.detail = inverted", "--run_name", "retrained", "--json")
        found = json.loads(agentrl(folder, "retrain", "inverted", *without))
        seconds = time.monotonic() - started
    held_out["retrained"] = found["held_out"]["retrained"]
    counts = {key: found[f"num_{key}"] for key in ("records", "groups", "steps", "emptied_groups")}
    return {
        "held_out": held_out,
        "origin": found["origin"],
        "left_out": {**counts, "emptied_steps": found["emptied_steps"]},
        "retrain_seconds_with_evaluation": round(seconds, 1),
        "again": {"is_equal": is_equal, "steps": len(again["steps"])},
        "steps": steps,
        "machine": about,
    }


def main() -> None:
    """Measure the requested seeds; write each to the file at once."""
    flags = parser(__doc__, "retrain")
    flags.add_argument("--seed", type=int, action="append", help="1, 2 and 3 by default")
    flags.add_argument("--steps", type=int, default=30, help="of both runs, more than 20")
    flags.add_argument("--again", action="store_true", help="also rows that the file has")
    given = flags.parse_args()
    for seed in given.seed or (1, 2, 3):
        runs = stored(given.out).get("runs", {})
        if str(seed) in runs and not given.again:
            continue
        runs[str(seed)] = measured(seed, given.steps)
        own = [row["held_out"] for row in runs.values()]
        means = {name: round(mean(one[name] for one in own), 4) for name in own[0]}
        minus = round(means["retrained"] - means["clean"], 4)
        keep(given.out, {"held_out": means, "retrained_minus_clean": minus, "runs": runs})


if __name__ == "__main__":
    main()
