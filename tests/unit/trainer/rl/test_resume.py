"""A trainer that is killed goes on as if nothing had happened."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.patience import PATIENCE
from support.training import MakeConfig, Player, train_tasks

from agentrl.config.sections import RootConfig
from agentrl.distributed import Ranks
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.rl.training_loop import lead

MIXED = [1.0, 0.0]
MAIN = """
import sys
from agentrl.config.sections import RootConfig
from agentrl.trainer.rl.training_loop import train
config = RootConfig.model_validate_json(sys.argv[1])
store = type(config.store)(db_connection_string=sys.argv[2])
train(config.model_copy(update={"store": store}))
"""


def kill_after_steps(config: RootConfig, num_steps: int, log: Path) -> None:
    """Start a trainer process and kill it once it has made its steps and waits for more."""
    uri = config.store.db_connection_string
    assert uri is not None
    with log.open("wb") as output:
        trainer = subprocess.Popen(
            [sys.executable, "-c", MAIN, config.model_dump_json(), uri.get_secret_value()],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        metrics = config.run.output_path / "metrics.jsonl"
        deadline = time.monotonic() + PATIENCE
        while not metrics.is_file() or len(metrics.read_text().splitlines()) < num_steps:
            assert trainer.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, "the trainer is too slow"
            time.sleep(0.05)
    finally:
        trainer.kill()
        trainer.wait(10)


@pytest.mark.parametrize(
    ("dtype", "async_save", "lora_rank"),
    [
        ("float32", "false", 0),
        pytest.param("bfloat16", "true", 0, marks=pytest.mark.slow),
        pytest.param("bfloat16", "false", 4, marks=pytest.mark.slow),
    ],
    ids=["plain", "async", "adapter"],
)
async def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(
    make_config: MakeConfig,
    mongod: EmbeddedMongo,
    model_path: Path,
    tmp_path: Path,
    dtype: str,
    async_save: str,
    lora_rank: int,
) -> None:
    """Killed after step 5, past the checkpoint of step 4, with step 5 reserved but not committed."""
    flags = {
        "max_steps": 8,
        "save_steps": 4,
        "groups_per_step": 1,
        "num_generations": 2,
        "enable_sampling": "true",
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "full_determinism": "true",
        "torch_dtype": dtype,
        "async_save": async_save,
        "lora_rank": lora_rank,
    }
    weights, rewards = {}, {}
    torch.set_num_threads(1)
    for name in ("whole", "killed"):
        config = make_config(
            **flags,
            run_name=f"resume_{name}_{dtype}_{lora_rank}",
            output_dir=tmp_path / name,
            db_connection_string=mongod.uri(f"resume_{name}_{dtype}_{lora_rank}"),
        )
        assert config.store.db_connection_string is not None
        uri = config.store.db_connection_string.get_secret_value()
        async with TrajectoryStore.connect(uri) as store:
            await store.ensure_schema()
            await store.tasks.add(train_tasks(8, 2))
            player = Player(model_path)
            await player.play_groups(store, [MIXED] * 5)
            if name == "killed":
                kill_after_steps(config, 5, tmp_path / "trainer.log")
            await player.play_groups(store, [MIXED] * 3)
            result = await lead(config, Ranks(), stop=asyncio.Event())
            assert (result.status, result.step) == ("completed", 8)
            for order, group in enumerate(await all_groups(store)):
                for entry in group:
                    assert (entry["status"], entry["trained_count"]) == ("trained", 1)
                    assert entry["step"] == order + 1
            await store.drop_database()
        (last,) = (config.run.output_path / "checkpoints/000008/model").glob("*.safetensors")
        weights[name] = last.read_bytes()
        summary = json.loads((config.run.output_path / "summary.json").read_text())
        rewards[name] = (summary["reward_mean"], summary["steps"])
    assert weights["killed"] == weights["whole"]
    assert weights["killed"] != (model_path / "model.safetensors").read_bytes()
    assert rewards["killed"] == rewards["whole"] == ([0.5] * 8, 8)


async def all_groups(store: TrajectoryStore) -> list[list[dict[str, object]]]:
    """Ledger entries of all groups, by order."""
    found = []
    async for task in store.tasks.find(split="train"):
        documents = await store.database["record_data"].find({"task_id": task.id}).to_list()
        found.append([document["ledger"]["trainer"] for document in documents])
    return found
