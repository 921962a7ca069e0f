"""AReaL itself, from PyPI, reads what the engine `areal` wrote. No GPU: nothing is trained."""

import json
import os
import subprocess
from typing import Any

import pytest
from support.agent_venvs import ROOT, python_with
from support.function_agents import CATALOGUE, contains_answer, two_conversations

from agentrl.plugins.integrations import AgentTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_SAMPLES = 4
CONFIG = {
    "actor.path": str(ROOT / "assets/demo/model"),
    "gconfig": {"n_samples": NUM_SAMPLES, "max_new_tokens": 48, "max_tokens": 700},
    "train_dataset.batch_size": 2,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    item = next(iter(CATALOGUE))
    answer = str(CATALOGUE[item]["stock"] + 6)
    trainer = AgentTrainer(
        two_conversations,
        config=CONFIG,
        reward_func=contains_answer,
        train_dataset=[{"query": f"{item}: packs once 6 arrive?", "answer": answer}],
        run_path=tmp_path_factory.mktemp("areal"),
        train_engine_name="areal",
    )
    python = python_with("areal")
    check = ROOT / "tests/support/areal_check.py"
    done = subprocess.run(
        [python, check, trainer.run_path, "two_conversations_workflow.AgentWorkflow"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return read


def rows(found: dict[str, Any], key: str) -> list[list[Any]]:
    """Return a tensor's rows without their padding."""
    lengths = [sum(mask) for mask in found["attention_mask"]]
    return [row[:length] for row, length in zip(found[key], lengths, strict=True)]


def test_every_call_is_in_a_row_exactly_as_it_was_sampled(found: dict[str, Any]) -> None:
    ids = rows(found, "input_ids")
    for prompt, output in found["calls"]:
        whole = prompt + output
        assert any(row[: len(whole)] == whole for row in ids)
    sampled = sorted(token for _, output in found["calls"] for token in output)
    masks = rows(found, "loss_mask")
    trained = [
        t for row, m in zip(ids, masks, strict=True) for t, on in zip(row, m, strict=True) if on
    ]
    assert sorted(trained) == sampled


def test_versions_and_logprobs_stand_at_the_sampled_tokens_only(found: dict[str, Any]) -> None:
    for mask, versions, logprobs in zip(
        *(rows(found, key) for key in ("loss_mask", "versions", "logprobs")), strict=True
    ):
        assert versions == [3 if on else -1 for on in mask]
        assert logprobs == [-0.5 if on else 0.0 for on in mask]
    assert found["types"] == {
        "input_ids": "torch.int32",
        "loss_mask": "torch.int32",
        "logprobs": "torch.float32",
        "versions": "torch.int32",
        "attention_mask": "torch.bool",
        "rewards": "torch.float32",
    }


def test_each_conversation_of_a_rollout_is_a_row_with_the_rollouts_reward(
    found: dict[str, Any],
) -> None:
    rewards = found["rewards"]
    assert len(rewards) == 2 * NUM_SAMPLES
    assert rewards[0::2] == rewards[1::2]
    # Normalised over the group's rollouts.
    assert sum(rewards[0::2]) == pytest.approx(0.0, abs=1e-5)
    assert found["grouped_by_areal"] == 1


def test_areals_own_configuration_takes_the_file(found: dict[str, Any]) -> None:
    saver, cluster = found["fileroots"]
    assert saver == cluster
