"""The files for verl, by themselves; tests/integration has verl read them."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from support.nasty_agent import PROMPT, write_agent

from agentrl.errors import ConfigError
from agentrl.plugins.integrations import AgentTrainer
from agentrl.plugins.integrations.agent_worker.description import parse_description
from agentrl.plugins.integrations.agent_worker.references import load_object

ROWS = [{"query": "How many?", "answer": 17, "level": 1}, {"query": "Wie groß?", "answer": "é"}]


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str.strip() == ground_truth)


def build(tmp_path: Path, **changes: Any) -> AgentTrainer:
    arguments: dict[str, Any] = {
        "agent": write_agent(tmp_path),
        "config": {"actor_rollout_ref": {"model": {"path": "some/model"}}, "trainer.nnodes": 2},
        "reward_func": reward,
        "train_dataset": ROWS,
        "run_path": tmp_path / "run",
        "train_engine_name": "verl",
    }
    return AgentTrainer(**{**arguments, **changes})


def module_of(trainer: AgentTrainer) -> Path:
    entries = yaml.safe_load((trainer.run_path / "agent.yaml").read_text())
    assert [entry["name"] for entry in entries] == ["the_gr_e_agent_loop"]
    return trainer.run_path / f"{entries[0]['_target_'].partition('.')[0]}.py"


def test_the_agent_loops_files_hold_the_agent_as_it_was_given(tmp_path: Path) -> None:
    path = module_of(build(tmp_path))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    settings = json.loads((path.parent / "agent_workers.json").read_text(encoding="utf-8"))
    description = parse_description(settings["agent"])
    assert description.name == 'the "Größe" agent'
    assert description.model_dump()["arguments"]["system_prompt"] == PROMPT
    assert [node.name for node in tree.body if isinstance(node, ast.ClassDef)] == ["VerlAgentLoop"]


def test_empty_keys_are_filled_and_given_ones_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = {"data": {"val_files": "mine.parquet"}, "trainer.default_local_dir": ""}
    trainer = build(tmp_path, config=given)
    written = yaml.safe_load((run / "final_trainer.yaml").read_text(encoding="utf-8"))
    assert written["defaults"] == ["ppo_trainer", "_self_"]
    for config in (written, trainer.config):
        agent = config["actor_rollout_ref"]["rollout"]["agent"]
        assert agent["agent_loop_config_path"] == str(run / "agent.yaml")
        assert config["reward"]["custom_reward_function"] == {
            "path": str(run / "reward_func.py"),
            "name": "compute_score",
        }
        assert config["data"]["train_files"] == str(run / "train_data.parquet")
        assert config["data"]["val_files"] == "mine.parquet"
        assert config["trainer"]["default_local_dir"] == str(run / "checkpoints")


def test_questions_become_parquet_and_training_data_serve_as_test_data(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    rows = pq.read_table(trainer.run_path / "train_data.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == ["How many?", "Wie groß?"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["17", "é"]
    assert {row["agent_name"] for row in rows} == {"the_gr_e_agent_loop"}
    assert trainer.config["data"]["val_files"] == trainer.config["data"]["train_files"]
    assert trainer.config["trainer"]["nnodes"] == 2


def agent_of(trainer: AgentTrainer) -> tuple[bytes, bytes]:
    module = module_of(trainer)
    return module.read_bytes(), module.with_name("agent_workers.json").read_bytes()


async def test_the_reward_file_asks_the_users_function_in_its_own_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[5]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root / "src"), str(root / "tests")]))
    path = build(tmp_path).run_path / "reward_func.py"
    compute_score = load_object(f"{path}:compute_score", "reward_func")
    # verl passes numpy's numbers on in extra_info.
    turns = {"num_turns": np.int32(3), "scores": np.zeros(2)}
    try:
        assert await compute_score("", " 17", "17", turns) == 1.0
        assert await compute_score("", "18", "17") == 0.0
    finally:
        load_object(f"{path}:workers", "reward_func").close()


def test_the_path_may_be_text(tmp_path: Path) -> None:
    first = agent_of(build(tmp_path))
    second = agent_of(build(tmp_path, agent=str(tmp_path / "nasty.yaml")))
    assert first == second


def scorer(answer: str, truth: object) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_func": scorer}, "reward_func: verl calls scorer with data_source"),
        ({"train_dataset": None}, r"train_dataset: missing; pass it, or data\.train_files"),
        ({"config": {"custom_reward_function.path": "x.py"}}, r"use reward\.custom_reward"),
        ({"config": {"a": 1, "a.b": 2}}, r"config: a\.b: a has a value of its own"),
        (
            {"train_dataset": [{"query": "q", "level": 1}, {"query": "r", "level": "x"}]},
            "train_dataset: fields have different types in different rows",
        ),
    ],
)
def test_what_verl_cannot_use_is_refused_before_it_starts(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)
