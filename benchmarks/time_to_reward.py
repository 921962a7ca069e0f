"""Wall time to learn the demo: `agentrl run` against TRL's GRPO trainer with tools.

    python benchmarks/time_to_reward.py                       # ten seeds of each side, in alternation
    python benchmarks/time_to_reward.py --only trl --seed 2   # one run more; the file keeps the others
    python benchmarks/time_to_reward.py --only trl --seed 1 --set learning_rate=0.0008   # a trial

Both sides have the demo's model, questions, tools, prompts and batch (16 questions, 8 attempts
each). Our side is the demo as users run it: database, tool server over MCP, engine, sampler,
trainer. TRL has the tools as plain functions in its single process. The clock starts with the
command and stops at the end of the first step at which the mean reward of the last five steps is at
least 0.8 and the weights answer at least 0.9 of the held-out questions (evaluated outside of the
clock, the same way for both).

`wall_ratio` is the mean of our seconds over the mean of TRL's, over the seeds that both have;
`cpu_ratio` is the same for CPU seconds, which depend less on other work on the machine, and
`rollouts_ratio` for rollouts, which do not depend on it; `..._median` are the ratios of the medians.
A run with `--set` is a trial: it is stored under `trials`, not under `runs`, and `choices` has the
quartiles of our trials by what they set. Our side's settings are those of the demo, as it is; those of
the other side are the best of its trials.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import psutil
import torch
import yaml
from harness.processes import ROOT
from harness.results import keep, machine, parser, setting, stored
from harness.shop_goal import HELD_OUT, HeldOut, is_rewarded
from transformers import Qwen3ForCausalLM

from agentrl.config.loading import nested, read_yaml
from agentrl.inference.weight_sync.version_files import version_dir

SIDES = ("ours", "trl")
SEEDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
_POLL_SECONDS = 0.2
_STOP_SECONDS = 60


def rewards_of(steps: list[dict[str, Any]]) -> list[float]:
    """Return the mean rewards of the steps with new rollouts."""
    return [step["reward_mean"] for step in steps if step.get("reward_mean") is not None]


def run_ours(seed: int, max_steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Run the demo until it reaches the goal; return its cost."""
    config = ROOT / "assets/demo/grpo.yaml"
    return run_to_goal(config, HeldOut(), seed, max_steps, settings)


def run_to_goal(
    config: Path, held_out: HeldOut, seed: int, max_steps: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Run a configuration until it reaches the goal; return its cost.

    Args:
        config: file of the configuration.
        held_out: tells what the weights of a step are worth.
        seed: of the run.
        max_steps: gives up after so many steps.
        settings: values by name that override the configuration.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(nested(read_yaml(config) | settings)))
        words = ["--run_name", "goal", "--config", str(file)]
        words += ["--output_dir", str(folder / "out"), "--logs_dir", str(folder / "logs")]
        words += ["--mongo_data_dir", str(folder / "mongo"), "--seed", str(seed)]
        words += ["--max_steps", str(max_steps)]
        started = time.time()
        with running([sys.executable, "-m", "agentrl", "run", *words]) as process:
            steps: list[dict[str, Any]] = []
            cpu, found = 0.0, None
            for step in metrics_of(process, folder / "out/metrics.jsonl"):
                steps.append(step)
                cpu = max(cpu, tree_cpu(process.pid))
                if not is_rewarded(rewards_of(steps)):
                    continue
                weights = version_dir(folder / "out/policy", step["step"])
                found = held_out.reward(Qwen3ForCausalLM.from_pretrained(weights))
                if found >= HELD_OUT:
                    break
    return {
        "reached": found is not None and found >= HELD_OUT,
        "held_out": found,
        "seconds": steps[-1]["time"] - started,
        "cpu_seconds": cpu,
        "rollouts": sum(step["num_records"] for step in steps),
        "sampled_tokens": sum(step["num_output_tokens"] for step in steps),
        "trained_tokens": sum(step["num_trained_tokens"] for step in steps),
        "steps": len(steps),
        "rewards": rewards_of(steps),
        "settings": settings,
    }


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command during the block, then interrupt it as Ctrl-C does."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(_STOP_SECONDS)


def metrics_of(process: subprocess.Popen[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics as they are written, until the run ends."""
    read = 0
    while True:
        is_running = process.poll() is None
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        for line in lines[read:]:
            if line.endswith("\n"):
                read += 1
                yield json.loads(line)
        if not is_running:
            return
        time.sleep(_POLL_SECONDS)


def tree_cpu(pid: int) -> float:
    """Return the CPU seconds so far of a process and all its descendants."""
    try:
        top = psutil.Process(pid)
        processes = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    return float(sum(sum(process.cpu_times()[:4]) for process in processes))


def run_trl(seed: int, max_steps: int, settings: dict[str, Any], python: str) -> dict[str, Any]:
    """Run TRL until it reaches the goal; return its cost."""
    script = str(Path(__file__).with_name("time_to_reward_trl.py"))
    command = [python, script, str(seed), str(max_steps), json.dumps(settings)]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def ratios(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios over the seeds that both sides have."""
    shared = sorted(set(runs["ours"]) & set(runs["trl"]))
    if not shared:
        return {}

    def over(field: str, average: Callable[[list[float]], float] = mean) -> float:
        ours, trl = (average([runs[side][seed][field] for seed in shared]) for side in SIDES)
        return float(round(ours / trl, 3))

    return {
        "wall_ratio": over("seconds"),
        "wall_ratio_median": over("seconds", median),
        "cpu_ratio": over("cpu_seconds"),
        "rollouts_ratio": over("rollouts"),
        "rollouts_ratio_median": over("rollouts", median),
        "seeds": shared,
        "all_reached": all(runs[side][seed]["reached"] for side in SIDES for seed in shared),
        "seconds": {
            side: {seed: round(runs[side][seed]["seconds"], 1) for seed in shared} for side in SIDES
        },
    }


def choices(runs: dict[str, Any], trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each choice of settings cost our side, the demo's own first."""
    found = defaultdict(list)
    for one in (*runs.values(), *trials):
        found[json.dumps(one["settings"], sort_keys=True)].append(one)
    return [
        {
            "settings": json.loads(settings),
            "seeds": len(of_settings),
            "reached": sum(one["reached"] for one in of_settings),
            "rollouts": quartiles([one["rollouts"] for one in of_settings]),
            "seconds": quartiles([one["seconds"] for one in of_settings]),
        }
        for settings, of_settings in found.items()
    ]


def quartiles(values: list[float]) -> list[float]:
    """Return the three quartiles, which are the value itself if there is only one."""
    found = quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return [round(value, 1) for value in found]


def main() -> None:
    """Run the requested seeds; write each result to the file at once."""
    flags = parser(__doc__, "time_to_reward")
    flags.add_argument("--only", choices=SIDES, help="run only one side")
    flags.add_argument("--seed", type=int, action="append", help="1 to 10 by default")
    flags.add_argument("--max_steps", type=int, default=80, help="give up after this many steps")
    flags.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    flags.add_argument("--trl_python", default=sys.executable, help="Python interpreter with TRL")
    given = flags.parse_args()
    settings = dict(given.set)
    sides = (given.only,) if given.only else SIDES
    for seed, side in product(given.seed or SEEDS, sides):
        about = {"machine": machine()}
        if side == "ours":
            row = run_ours(seed, given.max_steps, settings) | about
        else:
            row = run_trl(seed, given.max_steps, settings, given.trl_python) | about
        before = stored(given.out)
        runs = before.get("runs", {name: {} for name in SIDES})
        trials = before.get("trials", {name: [] for name in SIDES})
        if settings:
            trials[side].append({"seed": seed, **row})
        else:
            runs[side][str(seed)] = row
        chosen = choices(runs["ours"], trials["ours"])
        keep(given.out, {**ratios(runs), "choices": chosen, "runs": runs, "trials": trials})


if __name__ == "__main__":
    main()
