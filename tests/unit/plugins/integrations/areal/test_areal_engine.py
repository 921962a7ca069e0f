"""The files for AReaL, by themselves; tests/integration has AReaL read them."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.nasty_agent import PROMPT, write_agent

from agentrl.errors import ConfigError
from agentrl.plugins.integrations import AgentTrainer
from agentrl.plugins.integrations.agent_worker.description import parse_description

ROWS = [{"query": "How many?", "answer": 17, "level": 1}, {"query": "Wie groß?", "answer": "é"}]


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str.strip() == ground_truth)


def scorer(answer: str, truth: object) -> float:
    return 0.0


def build(tmp_path: Path, **changes: Any) -> AgentTrainer:
    arguments: dict[str, Any] = {
        "agent": write_agent(tmp_path),
        "config": {"actor.path": "some/model", "gconfig": {"n_samples": 3}},
        "reward_func": reward,
        "train_dataset": ROWS,
        "run_path": tmp_path / "run",
        "train_engine_name": "areal",
    }
    return AgentTrainer(**{**arguments, **changes})


def test_the_workflows_files_hold_the_agent_and_the_size_of_the_group(tmp_path: Path) -> None:
    (path,) = build(tmp_path).run_path.glob("*_workflow.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    settings = json.loads((path.parent / "agent_workers.json").read_text(encoding="utf-8"))
    description = parse_description(settings["agent"])
    assert description.model_dump()["arguments"]["system_prompt"] == PROMPT
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert cls.name == "AgentWorkflow"
    assert "n_samples = 3" in path.read_text(encoding="utf-8")


def test_empty_keys_are_filled_and_given_ones_stay(tmp_path: Path) -> None:
    config = {"actor": {"path": "m", "backend": "fsdp:d4"}, "trial_name": "mine"}
    trainer = build(tmp_path, config=config)
    written = yaml.safe_load((trainer.run_path / "areal.yaml").read_text(encoding="utf-8"))
    assert written == trainer.config
    assert written["actor"]["backend"] == "fsdp:d4"
    assert written["trial_name"] == "mine"
    assert written["rollout"]["backend"] == "sglang:d1"
    assert written["train_dataset"]["path"] == str(trainer.run_path / "train_data.jsonl")
    # The workflow plays the whole group.
    assert written["gconfig"]["n_samples"] == 1


def test_questions_whose_fields_differ_travel_as_text(tmp_path: Path) -> None:
    lines = (build(tmp_path).run_path / "train_data.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(json.loads(line)["question"]) for line in lines] == ROWS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_func": None}, "reward_func: missing; AReaL has no scorers"),
        ({"reward_func": scorer}, "reward_func: AReaL calls scorer with data_source"),
        ({"train_dataset": None}, "train_dataset: missing; pass it"),
        ({"config": {}}, r"actor\.path: missing; give the model"),
        ({"config": {"actor.path": "m", "gconfig.n_samples": 1}}, "n_samples must be a whole"),
        (
            {"config": {"actor": {"path": "m", "reward_norm": {"mean_level": "group"}}}},
            r"actor\.reward_norm: the workflow already normalizes rewards per group",
        ),
    ],
)
def test_what_areal_cannot_use_is_refused_before_it_starts(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)
