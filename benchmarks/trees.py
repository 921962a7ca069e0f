"""What rollouts that branch cost until a demo is learnt, against chains.

    python benchmarks/trees.py --task demo --seed 1              # both sides; the file keeps the others
    python benchmarks/trees.py --task errands --seed 1 --only tree
    python benchmarks/trees.py --task demo --seed 1 --only tree --set branch_rule=value    # a trial

Goal, clock and held-out evaluation are those of `time_to_reward.py`. Tasks are the demo
(`assets/demo/grpo.yaml`) and the longer one (`errands.yaml`). A group of chains has 8 rollouts; a tree has 11, of which 5 start at
the question and 6 leave one at a turn: with turns drawn uniformly these are as many sampled tokens as
8 chains (`tokens_per_step` has what they were). Groups a step, learning rate and everything else are
the same on both sides.

`tokens_ratio` and `wall_ratio` are means over means of the seeds that both sides have, tree over
chains. A run with `--set` is a trial: it is stored under `trials`, not under `runs`. A row that the
file has is not run again without `--again`.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from harness.processes import ROOT
from harness.results import keep, machine, parser, setting, stored
from harness.shop_goal import HeldOut
from time_to_reward import run_to_goal

from examples.shop.errands import MOST_TURNS, NUM_EVAL, NUM_TRAIN, split_errands

SIDES = ("chains", "tree")
SEEDS = (1, 2, 3)
TREE = {"rollouts": "tree", "num_generations": 11, "tree_roots": 5}
RATIOS = {"tokens_ratio": "sampled_tokens", "wall_ratio": "seconds"}


@dataclass(frozen=True)
class Task:
    """What is learnt."""

    config: str
    branch_depth: int
    """The last turn, from 0, of a flawless rollout of the shortest question."""


TASKS = {"demo": Task("grpo.yaml", 2), "errands": Task("errands.yaml", 4)}


def run(task: str, side: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Run one side of a task with one seed until it reaches the goal; return its cost."""
    settings = dict(TREE, branch_depth=TASKS[task].branch_depth) if side == "tree" else {}
    config = ROOT / "assets/demo" / TASKS[task].config
    held_out = (
        HeldOut(split_errands(0, NUM_TRAIN, NUM_EVAL)[1], max_turns=MOST_TURNS)
        if task == "errands"
        else HeldOut()
    )
    with tempfile.NamedTemporaryFile() as count:
        server = f"{sys.executable} benchmarks/harness/counted_shop.py {count.name} --port {{port}}"
        settings |= {"tool_server_command": server, **dict(given.set)}
        row = run_to_goal(config, held_out, seed, given.max_steps, settings)
        row["tool_calls"] = Path(count.name).stat().st_size
    del settings["tool_server_command"]
    return row | {"tokens_per_step": row["sampled_tokens"] / row["steps"]}


def ratios(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios over the seeds that both sides have."""
    shared = sorted(set(runs["chains"]) & set(runs["tree"]))
    if not shared:
        return {}
    means = {
        side: {name: mean(runs[side][seed][name] for seed in shared) for name in RATIOS.values()}
        for side in SIDES
    }
    return {
        **{
            ratio: round(means["tree"][name] / means["chains"][name], 3)
            for ratio, name in RATIOS.items()
        },
        "seeds": shared,
        "all_reached": all(runs[side][seed]["reached"] for side in SIDES for seed in shared),
    }


def main() -> None:
    """Run the requested rows; write each to the file at once."""
    flags = parser(__doc__, "trees")
    flags.add_argument("--task", choices=TASKS, action="append", help="both by default")
    flags.add_argument("--only", choices=SIDES, help="run only one side")
    flags.add_argument("--seed", type=int, action="append", help="1, 2 and 3 by default")
    flags.add_argument("--max_steps", type=int, default=80, help="give up after this many steps")
    flags.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE")
    flags.add_argument("--again", action="store_true", help="also rows that the file has")
    given = flags.parse_args()
    sides = (given.only,) if given.only else SIDES
    for task, seed, side in product(given.task or TASKS, given.seed or SEEDS, sides):
        empty = {"runs": {name: {} for name in SIDES}, "trials": {name: [] for name in SIDES}}
        is_stored = str(seed) in stored(given.out).get(task, empty)["runs"][side]
        if is_stored and not (given.set or given.again):
            continue
        about = {"machine": machine()}
        row = run(task, side, seed, given) | about
        found = stored(given.out).get(task, empty)
        if given.set:
            found["trials"][side].append({"seed": seed, **row})
        else:
            found["runs"][side][str(seed)] = row
        rows = {"runs": found["runs"], "trials": found["trials"]}
        keep(given.out, {task: {**ratios(found["runs"]), **rows}})


if __name__ == "__main__":
    main()
