"""The engine `trl`: two steps of TRL's own GRPOTrainer on rollouts of an agent."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.function_agents import CATALOGUE, contains_answer, shop_agent
from transformers import AutoModelForCausalLM

from agentrl.data.tokens import TurnTokens, turn_tokens
from agentrl.plugins.integrations import AgentTrainer
from agentrl.schema import DBRecordData
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

ROOT = Path(__file__).parents[2]
CONFIG = {
    "run_name": "with_trl",
    "model_name_or_path": str(ROOT / "assets/demo/model"),
    "torch_dtype": "float32",
    "num_generations": 4,
    "groups_per_step": 4,
    "max_steps": 2,
    "learning_rate": 1e-3,
    # Enough variety that some tries of a group fail.
    "temperature": 1.5,
    "max_new_tokens": 48,
    "num_samplers": 1,
    "inference_threads": 1,
    "mongo_port": 0,
    "trl": {"bf16": False, "gradient_checkpointing": False, "scale_rewards": False},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(150),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs agentrl-mongo[trl]"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[AgentTrainer, dict[str, Any]]:
    items = list(CATALOGUE)[:4]
    rows = [
        {"query": f"{item}: packs once 6 arrive?", "answer": str(CATALOGUE[item]["stock"] + 6)}
        for item in items
    ]
    trainer = AgentTrainer(
        shop_agent,
        config=CONFIG,
        reward_func=contains_answer,
        train_dataset=rows,
        run_path=tmp_path_factory.mktemp("trl"),
        train_engine_name="trl",
    )
    # The agent's processes import this test's neighbours.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]))
        return trainer, trainer.train()


async def records_of(run_path: Path) -> list[DBRecordData]:
    with EmbeddedMongo(run_path / "mongo", 0) as mongo:
        async with TrajectoryStore.connect(mongo.uri("with_trl"), "with_trl") as store:
            return [r async for r in store.ledger.find(status="trained", hydrate=True)]


def largest_error(folder: Path, turns: list[TurnTokens]) -> float:
    """Largest difference between the sampler's logprobs and those of the weights in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    errors = []
    for turn in turns:
        with torch.no_grad():
            logits = model(torch.tensor([turn.full_ids.tolist()])).logits[0, :-1]
        logprobs = torch.log_softmax(logits / turn.temperature, -1).numpy()
        positions = np.arange(turn.num_prompt_tokens - 1, len(turn.full_ids) - 1)
        errors.append(np.abs(logprobs[positions, turn.output_ids] - turn.behavior_logprobs).max())
    return float(max(errors))


def test_trl_takes_its_steps_and_leaves_a_model(
    trained: tuple[AgentTrainer, dict[str, Any]],
) -> None:
    trainer, summary = trained
    assert summary["status"] == "completed"
    assert summary["steps"] == 2
    assert len(summary["reward_mean"]) == 2
    steps = [entry for entry in summary["log"] if "grad_norm" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert any(entry["grad_norm"] > 0 for entry in steps)
    # What TRL saw as the reward is what the agent earned.
    assert [entry["reward"] for entry in steps] == pytest.approx(summary["reward_mean"])
    saved = trainer.run_path / "output/checkpoints/000002/model"
    assert AutoModelForCausalLM.from_pretrained(saved).num_parameters() > 0


async def test_each_batch_is_sampled_by_the_weights_that_trl_had_by_then(
    trained: tuple[AgentTrainer, dict[str, Any]],
) -> None:
    trainer, _ = trained
    records = await records_of(trainer.run_path)
    # The others hold nothing but calls that cannot be parsed, which carry no loss.
    assert 16 <= len(records) <= 32
    assert all(r.min_version == r.max_version for r in records)
    assert {(r.min_version, r.ledger["trainer"].step) for r in records} == {(0, 1), (1, 2)}
    policies = trainer.run_path / "output/policy"
    for version, other in ((0, 1), (1, 0)):
        turns = [t for r in records if r.min_version == version for t in turn_tokens(r.turns)]
        assert largest_error(policies / f"{version:06d}", turns) < 1e-3
        assert largest_error(policies / f"{other:06d}", turns) > 1e-2
