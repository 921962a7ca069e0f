"""The demo with an adapter instead of all weights: it learns, and every token is of its version."""

import json
import subprocess
from pathlib import Path

import pytest
from support.demo_run import ROOT, logs, run_command
from support.versions import check_versions

from agentrl.models.lora import merge_adapter
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    command = run_command(
        folder,
        max_steps=NUM_STEPS,
        groups_per_step=12,
        num_generations=8,
        learning_rate=0.004,
        lora_rank=16,
        keep_policies=NUM_STEPS + 1,
    )
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs(folder)
    return folder


def test_the_reward_rises_while_only_an_adapter_is_trained(folder: Path) -> None:
    summary = json.loads((folder / "output/summary.json").read_text())
    rewards = summary["reward_mean"]
    assert len(rewards) == NUM_STEPS
    # A step's mean of 96 tries is good to about 0.07: many steps are taken together.
    begun, later = rewards[:4], rewards[NUM_STEPS // 2 :]
    assert sum(later) / len(later) > sum(begun) / len(begun) + 0.08, rewards
    sizes = [
        sum(file.stat().st_size for file in policy.glob("*.safetensors"))
        for policy in (folder / "output/policy").iterdir()
    ]
    assert max(sizes) < (ROOT / "assets/demo/model/model.safetensors").stat().st_size


async def test_every_token_is_of_the_version_that_its_span_names(
    folder: Path, tmp_path: Path
) -> None:
    base = ROOT / "assets/demo/model"
    for policy in sorted((folder / "output/policy").iterdir())[:4]:
        merge_adapter(policy, base, tmp_path / policy.name)
    with EmbeddedMongo(folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("short")) as store:
            conversations = [
                await store.turns.of_record(record.id)
                async for record in store.records.find(split="train")
                if record.turns and record.max_version is not None and record.max_version < 4
            ]
    turns = [turn for turns in conversations for turn in turns]
    assert all(len(turn.version_spans) == 1 for turn in turns)
    assert {span.version for turn in turns for span in turn.version_spans} == {0, 1, 2, 3}
    assert check_versions(conversations[:60] + conversations[-60:], tmp_path) > 100
