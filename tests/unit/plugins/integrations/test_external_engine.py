"""What the engines have in common that start another framework."""

from pathlib import Path
from typing import Any

import pytest
from support.nasty_agent import KEY, TOKEN, write_agent

from agentrl.errors import ConfigError
from agentrl.plugins.integrations import AgentTrainer
from agentrl.plugins.integrations.external_engine import ExternalEngine

MODELS = {"verl": "actor_rollout_ref.model.path", "areal": "actor.path"}
FRAMEWORKS = {"verl": "verl", "areal": "AReaL"}

pytestmark = pytest.mark.parametrize("engine", MODELS)


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str.strip() == ground_truth)


def build(engine: str, folder: Path, **config: Any) -> AgentTrainer:
    return AgentTrainer(
        write_agent(folder),
        config={MODELS[engine]: "some/model", **config},
        reward_func=reward,
        train_dataset=[{"query": "How many?", "answer": 17}],
        run_path=folder / "run",
        train_engine_name=engine,
    )


def test_no_file_holds_a_secret_and_the_environment_does(engine: str, tmp_path: Path) -> None:
    trainer = build(engine, tmp_path)
    written = [path for path in trainer.run_path.rglob("*") if path.is_file()]
    assert len(written) >= 3
    for path in written:
        content = path.read_bytes()
        assert TOKEN.encode() not in content, path
        assert KEY.encode() not in content, path
    processor = trainer.train_processor
    assert isinstance(processor, ExternalEngine)
    assert {TOKEN, KEY} <= set(processor.environment.values())
    assert processor.environment["PYTHONPATH"].split(":")[0] == str(trainer.run_path)


def test_a_number_of_processes_that_is_none_is_refused(engine: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="agent_processes must be a whole number from 1"):
        build(engine, tmp_path, agent_processes=0)


def test_an_interpreter_that_is_not_there_is_refused(engine: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{engine}_python /no/python: program not found"):
        build(engine, tmp_path, **{f"{engine}_python": "/no/python"})


def test_training_says_how_to_get_a_framework_that_is_missing(engine: str, tmp_path: Path) -> None:
    trainer = build(engine, tmp_path)
    message = f"{FRAMEWORKS[engine]} is not installed for .*; create an environment"
    with pytest.raises(ConfigError, match=message):
        trainer.train()
