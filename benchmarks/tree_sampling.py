"""What the branches of trees cost: prompt tokens that servers compute again, and their training.

    python benchmarks/tree_sampling.py
    python benchmarks/tree_sampling.py --server http://127.0.0.1:30000

The demo runs for some steps with `--rollouts tree` and otherwise its own flags, on the embedded engine
or on a running server. The first turn that a branch samples has its parent's prompt, all of whose tokens
the parent was already served with. Those that were not in the cache of the branch's server (its
`cached_tokens`) were computed again: `computed_again` is their share, over all branches that ended.
`other_weights` is the share of branches that another version of the weights sampled than their parent's
turn; `computed_again_same_weights` leaves them out.

`training` has the tokens that the trainer computed, and their ratio to those of a row per rollout.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from harness.results import parser, report
from replay import agentrl, step_metrics

from agentrl.schema import DispatchedSamplingTask, rebuild_prompts
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

RUN = "tree_sampling"


def last_version(turn: DispatchedSamplingTask) -> int:
    """Return the version of the weights that sampled the end of a turn."""
    return turn.version_spans[-1].version


async def branches(database: str) -> dict[str, Any]:
    """Return what the branches of a run computed again of their parents' prompts."""
    prompts: list[int] = []
    computed: list[int] = []
    is_same: list[bool] = []
    async with TrajectoryStore.connect(database) as store:
        num_rollouts = 0
        async for record in store.records.find(status="scored"):
            num_rollouts += 1
            point = record.branch
            if point is None:
                continue
            turns = await store.turns.of_record(record.id)
            parent = (await store.turns.of_record(point.record_id, point.attempt))[point.turn]
            own = turns[point.turn]
            prompts.append(len(rebuild_prompts(turns)[point.turn]))
            computed.append(prompts[-1] - own.cached_tokens)
            is_same.append(last_version(parent) == own.version_spans[0].version)
    same = [
        pair
        for pair, kept in zip(zip(computed, prompts, strict=True), is_same, strict=True)
        if kept
    ]
    return {
        "rollouts": num_rollouts,
        "branches": len(prompts),
        "prompt_tokens_mean": round(mean(prompts), 1),
        "computed_again": round(sum(computed) / sum(prompts), 4),
        "other_weights": round(1 - mean(is_same), 4),
        "computed_again_same_weights": round(
            sum(again for again, _ in same) / sum(size for _, size in same), 4
        ),
    }


def training(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tokens of training on trees, relative to a row per rollout."""
    tokens = [step["num_forward_tokens"] for step in steps]
    by_rollout = [step["num_forward_tokens"] * step["merge_rollouts"] for step in steps]
    return {"tokens": sum(tokens), "tokens_ratio": round(sum(tokens) / sum(by_rollout), 3)}


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Return the costs of sampling and training."""
    server = {"inference_urls": given.server} if given.server else {}
    with tempfile.TemporaryDirectory() as name:
        folder, data_dir = Path(name), Path(name) / "mongo"
        agentrl(
            "run",
            folder,
            RUN,
            output_dir=folder / "played",
            mongo_data_dir=data_dir,
            max_steps=given.steps,
            rollouts="tree",
            **server,
        )
        with EmbeddedMongo(data_dir) as mongo:
            database = mongo.uri(RUN)
            return {
                "server": given.server or "embedded",
                "steps": given.steps,
                "sampling": asyncio.run(branches(database)),
                "training": training(step_metrics(folder / "played")),
            }


if __name__ == "__main__":
    flags = parser(__doc__, "tree_sampling")
    flags.add_argument("--steps", type=int, default=2)
    flags.add_argument(
        "--server", metavar="URL", help="a running SGLang that serves the demo's model"
    )
    report(flags, measured)
