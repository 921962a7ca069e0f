"""verl itself, from PyPI, reads what the engine `verl` wrote. No GPU: nothing is trained."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.agent_venvs import ROOT, python_with
from support.function_agents import contains_answer, shop_agent
from support.nasty_agent import PROMPT, write_agent

from agentrl.plugins.integrations import AgentTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = {
    "actor_rollout_ref": {"model": {"path": str(ROOT / "assets/demo/model")}},
    "data.max_prompt_length": 1000,
    "data.max_response_length": 400,
    "trainer.n_gpus_per_node": 1,
}


@pytest.fixture(scope="module")
def verl_python() -> Path:
    return python_with("verl")


def build(tmp_path: Path, agent: Any) -> AgentTrainer:
    rows = [{"query": f"candles: how many if we buy {n}?", "answer": str(40 + n)} for n in range(8)]
    return AgentTrainer(
        agent,
        config=CONFIG,
        reward_func=contains_answer,
        train_dataset=rows,
        run_path=tmp_path / "run",
        train_engine_name="verl",
    )


def check(python: Path, trainer: AgentTrainer, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [python, ROOT / "tests/support/verl_check.py", str(trainer.run_path), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_verl_composes_validates_and_instantiates_with_the_hardest_of_prompts(
    verl_python: Path, tmp_path: Path
) -> None:
    found = check(verl_python, build(tmp_path, write_agent(tmp_path)))
    assert found["loop"] == "VerlAgentLoop"
    assert found["adv_estimator"] == "grpo"
    assert found["agent"]["arguments"]["system_prompt"] == PROMPT
    assert found["right"] == 1.0
    assert found["wrong"] == 0.0


def test_a_rollout_in_verls_loop_trains_exactly_the_sampled_tokens(
    verl_python: Path, tmp_path: Path
) -> None:
    found = check(verl_python, build(tmp_path, shop_agent), "play")
    calls = found["calls"]
    assert len(calls) >= 2
    # What the servers were sent and gave is one growing sequence, never encoded anew.
    ids = found["prompt_ids"] + found["response_ids"]
    for prompt, output in calls:
        assert ids[: len(prompt) + len(output)] == prompt + output
    sampled = [token for _, output in calls for token in output]
    mask = found["response_mask"]
    assert [t for t, m in zip(found["response_ids"], mask, strict=True) if m] == sampled
    assert [p for p, m in zip(found["logprobs"], mask, strict=True) if m] == [-0.5] * len(sampled)
    assert found["prompt_ids"] == calls[0][0]
