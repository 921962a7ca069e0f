"""Training of an adapter from the command's side: what is left on disk, and what is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.training import MakeConfig, Player, train_tasks, write_model
from torch.distributed.checkpoint.filesystem import FileSystemReader

from agentrl.cli.main import main
from agentrl.config.sections import RootConfig
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.plugins.sft.sft_process import SftResult, lead_sft
from agentrl.store import TrajectoryStore
from agentrl.trainer.rl.training_loop import lead

torch.set_num_threads(1)
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def make_sft(make_config: MakeConfig, tmp_path: Path) -> MakeConfig:
    talks = tmp_path / "talks.jsonl"
    talk = [{"role": "user", "content": "after 1?"}, {"role": "assistant", "content": "it is 2"}]
    talks.write_text(json.dumps({"messages": talk}) + "\n")

    def make(**flags: Any) -> RootConfig:
        values: dict[str, Any] = {
            "run_name": "tuned",
            "train_file": talks,
            "per_device_train_batch_size": 1,
            "max_steps": 6,
            "num_train_epochs": 6,
            "learning_rate": 0.02,
            "lora_rank": 4,
        }
        return make_config(**(values | flags))

    return make


def flags_of(config: RootConfig) -> list[str]:
    return ["--run_name", config.run.run_name, "--output_dir", str(config.run.output_path)]


async def fine_tune(config: RootConfig) -> SftResult:
    return await lead_sft(config, Ranks(), stop=asyncio.Event())


async def test_fine_tuning_leaves_an_adapter_that_peft_loads_and_the_base_as_it_was(
    make_sft: MakeConfig, model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (model_path / "model.safetensors").read_bytes()
    config = make_sft()
    result = await fine_tune(config)
    assert {file.name for file in result.model_path.iterdir()} == ADAPTER_FILES
    written = json.loads((result.model_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(model_path)
    assert (written["r"], written["lora_alpha"]) == (4, 32)
    losses = json.loads(result.summary_path.read_text())["loss"]
    assert min(losses) < losses[0] - 0.2
    assert (model_path / "model.safetensors").read_bytes() == before
    assert main(["export", *flags_of(config)]) == 0
    merged = config.run.output_path / "merged"
    assert str(merged) in capsys.readouterr().out
    name = "model.layers.0.mlp.up_proj.weight"
    changed, start = (load_file(p / "model.safetensors")[name] for p in (merged, model_path))
    assert not torch.equal(changed, start)
    (checkpoint, *_) = sorted((config.run.output_path / "checkpoints").iterdir())
    saved = FileSystemReader(checkpoint / "state").read_metadata().state_dict_metadata
    moments = [name for name in saved if name.endswith(".exp_avg")]
    assert len(moments) == 2 * 2 * 7, "A and B of seven linear layers in two blocks"
    assert all(".lora_" in name for name in moments)


async def test_a_run_goes_on_only_as_what_it_began(
    make_sft: MakeConfig, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await fine_tune(make_sft(max_steps=1))
    with pytest.raises(ConfigError, match="resume it with --lora_rank 4"):
        await fine_tune(make_sft(lora_rank=0))
    with pytest.raises(ConfigError, match="--lora_rank 4 --lora_alpha 32"):
        await fine_tune(make_sft(lora_rank=8))
    other = write_model(tmp_path / "other", seed=3)
    with pytest.raises(ConfigError, match=f"adapter of {model_path}"):
        await fine_tune(make_sft(model_name_or_path=other))
    result = await fine_tune(make_sft(max_steps=2))
    assert result.step == 2
    await fine_tune(make_sft(output_dir=tmp_path / "full", lora_rank=0, max_steps=1))
    with pytest.raises(ConfigError, match="resume it without --lora_rank"):
        await fine_tune(make_sft(output_dir=tmp_path / "full"))
    assert main(["export", "--output_dir", str(tmp_path / "full")]) == 2
    assert "already contains all weights" in capsys.readouterr().err


async def test_a_run_with_a_penalty_against_its_base_starts_at_no_distance_and_moves_away(
    make_config: MakeConfig, model_path: Path
) -> None:
    config = make_config(
        lora_rank=4, kl_coefficient=0.01, groups_per_step=1, learning_rate=0.05, max_steps=3
    )
    assert config.store.db_connection_string is not None
    uri = config.store.db_connection_string.get_secret_value()
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await store.tasks.add(train_tasks(3, 3))
        await Player(model_path).play_groups(store, [[1.0, 0.0, 0.0]] * 3)
        result = await lead(config, Ranks(), stop=asyncio.Event())
        await store.drop_database()
    lines = (config.run.output_path / "metrics.jsonl").read_text().splitlines()
    distances = [json.loads(line)["kl"] for line in lines]
    assert distances[0] == pytest.approx(0.0, abs=1e-6)
    assert distances[-1] > 1e-4
    policies = sorted((config.run.output_path / "policy").iterdir())
    assert {file.name for file in policies[-1].iterdir()} == ADAPTER_FILES
    assert result.step == 3
