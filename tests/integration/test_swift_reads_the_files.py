"""ms-swift itself, from PyPI, reads what the engine `swift` wrote. Without a GPU, so without vLLM."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from support.agent_venvs import ROOT, python_with
from support.function_agents import CATALOGUE, text_and_answer, two_conversations

from agentrl.plugins.integrations import AgentTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = {
    "model": str(ROOT / "assets/demo/model"),
    "model_type": "qwen3",
    "template": "qwen3",
    "rollout": {"model_type": "qwen3", "template": "qwen3"},
    "tuner_type": "full",
    "torch_dtype": "float32",
    "max_steps": 1,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "max_completion_length": 16,
    "logging_steps": 1,
    "report_to": "none",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    item = next(iter(CATALOGUE))
    answer = str(CATALOGUE[item]["stock"] + 6)
    trainer = AgentTrainer(
        two_conversations,
        config=CONFIG,
        reward_func=text_and_answer,
        train_dataset=[{"query": f"{item}: packs once 6 arrive?", "answer": answer}] * 4,
        run_path=tmp_path_factory.mktemp("swift"),
        train_engine_name="swift",
    )
    return trainer.run_path


def run_swift(folder: Path, *words: str | Path) -> str:
    paths = [str(ROOT / "src"), str(ROOT / "tests"), str(folder)]
    done = subprocess.run(
        [python_with("swift"), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_the_scheduler_returns_the_agents_conversation_as_sampled(folder: Path) -> None:
    printed = run_swift(folder, ROOT / "tests/support/swift_check.py", folder)
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    turns = found["response_token_ids"]
    assert len(turns) >= 1
    assert all(turn in found["calls"] for turn in turns)
    assert len(found["calls"]) > len(turns)  # the second conversation's
    assert found["response_loss_mask"] == [[1] * len(turn) for turn in turns]
    assert [len(turn) for turn in found["rollout_logprobs"]] == [len(turn) for turn in turns]
    replies = [m["content"] for m in found["messages"] if m["role"] == "assistant"]
    assert replies[:-1] == turns[:-1]
    assert isinstance(replies[-1], str)
    assert found["rewards"] in ([0.5], [1.0])


def test_without_vllm_both_of_ms_swifts_commands_end_and_no_process_stays(folder: Path) -> None:
    paths = [str(ROOT / "src"), str(folder)]
    done = subprocess.run(
        [python_with("swift"), "-m", "agentrl.plugins.integrations.swift.swift_process", folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 1
    assert "No module named 'vllm'" in done.stderr
    commands = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert not [
        command for command in commands if str(folder) in command and "swift/cli" in command
    ]


def test_ms_swift_reads_the_data_calls_the_reward_and_takes_a_step(folder: Path) -> None:
    settings = yaml.safe_load((folder / "swift.yaml").read_text())
    # What needs vLLM, and so a GPU: ms-swift then samples completions itself, without the agent.
    kept = {name: value for name, value in settings.items() if "vllm" not in name}
    del kept["multi_turn_scheduler"]
    (folder / "cpu.yaml").write_text(yaml.safe_dump(kept))
    run_swift(folder, "-m", "swift.cli.main", "rlhf", folder / "cpu.yaml")
    (log,) = (folder / "swift").rglob("logging.jsonl")
    step = json.loads(log.read_text().splitlines()[0])
    assert step["rewards/AgentReward/mean"] == step["reward"] >= 0.5
    assert step["global_step/max_steps"] == "1/1"
