"""A run of a mixture of experts whose trainer sends every token where the server sent it."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.demo_run import ROOT, RUN_NAME, logs, run_command
from support.mixtures import write_demo_mixture

from agentrl.data.rows import PackedRow, TokenTree
from agentrl.data.tokens import turn_tokens, with_routed_experts
from agentrl.models.load import load_policy
from agentrl.models.policy import target_logprobs
from agentrl.models.router_replay import make_routers_replay
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose servers compute in float32 and its trainer in bfloat16: routers choose otherwise.

    The mixture answers no question, so groups are kept whose tries are all wrong.
    """
    folder = tmp_path_factory.mktemp("replay")
    command = run_command(
        folder,
        model_name_or_path=write_demo_mixture(folder / "mixture"),
        router_replay="true",
        torch_dtype="bfloat16",
        max_steps=NUM_STEPS,
        min_score_spread=0,
        drop_zero_advantage="false",
    )
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs(folder)
    return folder


async def sampled_rows(folder: Path) -> list[tuple[PackedRow, np.ndarray]]:
    """The conversations of the first policy, with the server's logprobs of their sampled tokens."""
    rows = []
    with EmbeddedMongo(folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri(RUN_NAME)) as store:
            async for data in store.ledger.find(status="trained", hydrate=True):
                if data.max_version == 0:
                    turns = with_routed_experts(turn_tokens(data.turns), data.turns)
                    tree = TokenTree.from_tokens(turns)
                    logprobs = [t.behavior_logprobs for b in tree.branches for t in b.turns]
                    rows.append((tree.row, np.concatenate(logprobs)))
    return rows


async def test_replay_brings_the_trainers_logprobs_closer_to_the_servers(folder: Path) -> None:
    policy = load_policy(folder / "mixture")
    make_routers_replay(policy.model)
    gaps: dict[str, list[np.ndarray]] = {"replayed": [], "own": []}
    for row, behavior in await sampled_rows(folder):
        assert row.routed_experts is not None
        for name, choices in (("replayed", row.routed_experts), ("own", None)):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                logprobs = target_logprobs(policy, replace(row, routed_experts=choices)).logprobs
            gaps[name].append(np.abs(logprobs.numpy() - behavior))
    means, largest = (
        {name: float(figure(np.concatenate(found))) for name, found in gaps.items()}
        for figure in (np.mean, np.max)
    )
    assert means["replayed"] < 0.5 * means["own"], (means, largest)
    assert largest["replayed"] < 0.5 * largest["own"], (means, largest)
    steps = [json.loads(x) for x in (folder / "output/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == NUM_STEPS
    assert steps[0]["logprob_gap"] < 0.5 * means["own"]
