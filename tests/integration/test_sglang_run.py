"""`grpo_example.sh` with a real SGLang as its server: a few steps, with updates in flight."""

import json
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.demo_run import ROOT, logs, script_command
from support.engines import Oracle
from support.sglang import sglang_args, sglang_bin
from support.versions import check_versions

from agentrl.schema import DispatchedSamplingTask, rebuild_prompts
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

NUM_STEPS = 4
pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@dataclass(frozen=True)
class SGLangRun:
    folder: Path
    turns: list[list[DispatchedSamplingTask]]
    """All turns of each training record, in order."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    commands = sglang_bin()
    folder = tmp_path_factory.mktemp("sglang")
    command = script_command(
        folder,
        config=ROOT / "assets/demo/grpo.yaml",
        max_steps=NUM_STEPS,
        groups_per_step=8,
        num_generations=8,
        max_staleness=2,
        keep_policies=20,
        inference_backend="sglang",
    )
    command.append(f"--sglang_args={sglang_args()}")
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + logs(folder)
    return folder


@pytest.fixture
async def run(run_folder: Path) -> AsyncIterator[SGLangRun]:
    with EmbeddedMongo(run_folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("short")) as store:
            records = [r.id async for r in store.records.find(split="train") if r.turns]
            yield SGLangRun(run_folder, [await store.turns.of_record(record) for record in records])


def test_sglang_serves_the_steps(run_folder: Path) -> None:
    summary = json.loads((run_folder / "output/summary.json").read_text())
    assert summary["steps"] == NUM_STEPS


async def test_every_token_is_of_the_version_that_its_span_names(run: SGLangRun) -> None:
    assert check_versions(run.turns, run.folder / "output/policy") > 100


async def test_updates_came_while_turns_were_being_sampled(run: SGLangRun) -> None:
    switched = [turn for turns in run.turns for turn in turns if len(turn.version_spans) > 1]
    assert switched
    versions = {span.version for turns in run.turns for t in turns for span in t.version_spans}
    assert {0, 1, 2} <= versions


async def test_wrong_version_would_be_noticed(run: SGLangRun) -> None:
    """The weights of different steps give logprobs that differ by more than the tolerance."""
    oracle = Oracle()
    gaps = []
    for turns in run.turns:
        turn, prompt = turns[0], rebuild_prompts(turns)[0]
        for version in (0, 2):
            policy = run.folder / f"output/policy/{version:06d}"
            expected = oracle.logprobs(policy, prompt, turn.output_ids)
            gaps.append(float(np.abs(expected - turn.output_logprobs).max()))
    assert max(gaps) > 1e-2
