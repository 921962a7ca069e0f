"""Tokens to learn several errands: from the questions, and from the stored turns of a short run.

    python benchmarks/stored_turns.py                  # seeds 1, 2 and 3 of both sides, in alternation
    python benchmarks/stored_turns.py --seed 2 --again

`questions` is `assets/demo/errands.yaml` as it is. `stored` first runs it for `--steps` steps (`earlier`), then
starts again from the first weights with `--env stored:` and nothing else changed but the number of epochs.
Both end at the first step after which the mean reward of the last five is at least 0.8 and the weights
answer at least 0.9 of the held-out questions, from their beginning; evaluations are outside of the clock.

`tokens_ratio` is the mean of the tokens that `stored` sampled over that of `questions`;
`tokens_ratio_with_earlier` adds those of the short run, `wall_ratio` and `wall_ratio_with_earlier` are
seconds. Rollouts of turns that are given are not counted.
"""

import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from harness.processes import ROOT
from harness.results import keep, machine, parser, stored
from harness.shop_goal import HeldOut
from time_to_reward import metrics_of, run_to_goal

from agentrl.config.loading import read_yaml
from examples.shop.errands import MOST_TURNS, NUM_EVAL, NUM_TRAIN, split_errands

SIDES = ("questions", "stored")
CONFIG = ROOT / "assets/demo/errands.yaml"


def run(side: str, seed: int, max_steps: int, steps: int) -> dict[str, Any]:
    """Run one side with one seed until it reaches the goal; return its cost."""
    held_out = HeldOut(split_errands(0, NUM_TRAIN, NUM_EVAL)[1], max_turns=MOST_TURNS)
    if side == "questions":
        return run_to_goal(CONFIG, held_out, seed, max_steps, {"eval_strategy": "no"})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        about = earlier_run(folder, seed, steps)
        config = folder / "config.yaml"
        values = {key: value for key, value in read_yaml(CONFIG).items() if key != "train_file"}
        config.write_text(yaml.safe_dump(values))
        settings = {"eval_strategy": "no", "env": f"stored:{folder / 'out'}"}
        found = run_to_goal(config, held_out, seed, max_steps, settings | {"num_train_epochs": 12})
        return found | {"settings": {"num_train_epochs": 12}, "earlier": about}


def earlier_run(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Make the run whose turns are the questions; return its cost."""
    flags = {"run_name": "earlier", "config": CONFIG, "seed": seed, "max_steps": steps}
    flags |= {"output_dir": folder / "out", "logs_dir": folder, "mongo_data_dir": folder / "mongo"}
    flags |= {"eval_strategy": "no", "mongo_port": 0}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    started = time.time()
    command = [sys.executable, "-m", "agentrl", "run", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = list(metrics_of(process, folder / "out/metrics.jsonl"))
    assert process.wait() == 0
    return {
        "seconds": time.time() - started,
        "sampled_tokens": sum(row["num_output_tokens"] for row in rows),
        "rewards": [row["reward_mean"] for row in rows],
        "steps": steps,
    }


def ratios(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios over the seeds that both sides have."""
    shared = sorted(set(runs["questions"]) & set(runs["stored"]))
    if not shared:
        return {}
    found: dict[str, Any] = {"seeds": shared}
    for name, field in (("tokens", "sampled_tokens"), ("wall", "seconds")):
        whole = mean(runs["questions"][seed][field] for seed in shared)
        own = mean(runs["stored"][seed][field] for seed in shared)
        before = mean(runs["stored"][seed]["earlier"][field] for seed in shared)
        found[f"{name}_ratio"] = round(own / whole, 3)
        found[f"{name}_ratio_with_earlier"] = round((own + before) / whole, 3)
    reached = (runs[side][seed]["reached"] for side in SIDES for seed in shared)
    return {**found, "all_reached": all(reached)}


def main() -> None:
    """Run the requested seeds; write each result to the file at once."""
    flags = parser(__doc__, "stored_turns")
    flags.add_argument("--only", choices=SIDES, help="run only one side")
    flags.add_argument("--seed", type=int, action="append", help="1, 2 and 3 by default")
    flags.add_argument("--steps", type=int, default=4, help="of the short run")
    flags.add_argument("--max_steps", type=int, default=80, help="give up after this many steps")
    flags.add_argument("--again", action="store_true", help="also rows that the file has")
    given = flags.parse_args()
    sides = (given.only,) if given.only else SIDES
    for seed, side in product(given.seed or (1, 2, 3), sides):
        runs = stored(given.out).get("runs", {name: {} for name in SIDES})
        if str(seed) in runs[side] and not given.again:
            continue
        about = {"machine": machine()}
        runs[side][str(seed)] = run(side, seed, given.max_steps, given.steps) | about
        keep(given.out, {**ratios(runs), "runs": runs})


if __name__ == "__main__":
    main()
