"""The files for ms-swift, by themselves; tests/integration has ms-swift read them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.nasty_agent import PROMPT, write_agent

from agentrl.errors import ConfigError
from agentrl.plugins.integrations import AgentTrainer
from agentrl.plugins.integrations.agent_worker.description import parse_description

ROWS = [
    {"query": "How many?", "answer": 17, "level": 1},
    {"query": "Wie groß?", "answer": "é", "system_prompt": "Measure."},
]


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str.strip() == ground_truth)


def scorer(answer: str, truth: object) -> float:
    return 0.0


def build(tmp_path: Path, **changes: Any) -> AgentTrainer:
    arguments: dict[str, Any] = {
        "agent": write_agent(tmp_path),
        "config": {"model": "some/model", "learning_rate": 1e-6},
        "reward_func": reward,
        "train_dataset": ROWS,
        "run_path": tmp_path / "run",
        "train_engine_name": "swift",
    }
    return AgentTrainer(**{**arguments, **changes})


def test_empty_arguments_are_filled_and_given_ones_stay(tmp_path: Path) -> None:
    trainer = build(tmp_path, config={"model": "m", "vllm_server_port": 8123, "rollout": {"x": 1}})
    written = yaml.safe_load((trainer.run_path / "swift.yaml").read_text(encoding="utf-8"))
    assert written == trainer.config
    assert written["dataset"] == str(trainer.run_path / "train_data.jsonl")
    assert "val_dataset" not in written
    assert written["ENV"] == {"CUDA_VISIBLE_DEVICES": "1"}
    served = yaml.safe_load((trainer.run_path / "rollout.yaml").read_text(encoding="utf-8"))
    assert served == {
        "model": "m",
        "external_plugins": str(trainer.run_path / "swift_plugin.py"),
        "multi_turn_scheduler": "agentrl",
        "port": 8123,
        "vllm_use_async_engine": True,
        "ENV": {"CUDA_VISIBLE_DEVICES": "0"},
        "x": 1,
    }


def test_the_workers_file_holds_the_agent_and_the_reward(tmp_path: Path) -> None:
    path = build(tmp_path).run_path / "agent_workers.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    description = parse_description(settings["agent"])
    assert description.model_dump()["arguments"]["system_prompt"] == PROMPT
    assert settings["reward"].endswith(":reward")


def test_a_row_has_messages_and_the_whole_question_as_text(tmp_path: Path) -> None:
    lines = (build(tmp_path).run_path / "train_data.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [json.loads(row["agentrl_row"]) for row in rows] == ROWS
    assert [[m["role"] for m in row["messages"]] for row in rows] == [["user"], ["system", "user"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_func": None}, "reward_func: missing; ms-swift has no scorers"),
        ({"reward_func": scorer}, "reward_func: ms-swift calls scorer with data_source"),
        ({"train_dataset": None}, "train_dataset: missing; pass it"),
        ({"config": {}}, "config: model: missing; give the model"),
        ({"config": {"model": "m", "rollout": 3}}, "config: rollout must be a mapping, got 3"),
        ({"config": {"model": "m", "gconfig.n_samples": 4}}, "gconfig is a setting of areal"),
    ],
)
def test_what_ms_swift_cannot_do_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)


def test_an_evaluation_by_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ms-swift evaluates during training"):
        build(tmp_path).evaluate()
