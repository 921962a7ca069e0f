"""What the engine `trl` checks and writes; tests/integration has TRL train."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.function_agents import contains_answer, shop_agent

from agentrl.errors import ConfigError
from agentrl.plugins.integrations import AgentTrainer

ROWS = [{"query": f"How many is {n}?", "answer": str(n)} for n in range(4)]

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs agentrl-mongo[trl]"
)


def build(tmp_path: Path, **config: Any) -> AgentTrainer:
    return AgentTrainer(
        shop_agent,
        config={"num_generations": 4, "groups_per_step": 3, **config},
        reward_func=contains_answer,
        train_dataset=ROWS,
        run_path=tmp_path / "run",
        train_engine_name="trl",
    )


@needs_trl
def test_flags_and_further_arguments_become_trls_arguments(tmp_path: Path) -> None:
    trainer = build(
        tmp_path, max_steps=7, learning_rate=3e-5, seed=5, trl={"beta": 0.1, "loss_type": "dapo"}
    )
    run = trainer.run_path
    written = json.loads((run / "trl.json").read_text(encoding="utf-8"))
    assert (
        written.items()
        >= {
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "max_steps": 7,
            "learning_rate": 3e-5,
            "seed": 5,
            "temperature": 1.0,
            "beta": 0.1,
            "loss_type": "dapo",
            "output_dir": str(run / "output/trl"),
        }.items()
    )
    flags = yaml.safe_load((run / "run.yaml").read_text(encoding="utf-8"))
    # One temperature for all tokens, as TRL's loss wants it.
    assert flags["advanced"]["agent_sampling"] == "run"
    assert flags["agent"] == f"{run / 'worker_agent.py'}:run_agent"


@needs_trl
def test_a_step_may_be_cut_into_smaller_batches(tmp_path: Path) -> None:
    trainer = build(tmp_path, trl={"per_device_train_batch_size": 2})
    written = json.loads((trainer.run_path / "trl.json").read_text(encoding="utf-8"))
    assert written["gradient_accumulation_steps"] == 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"epsilon": 0.1}, r"epsilon is supported only by AgentRL's own trainer; .* `trl`"),
        ({"warmup-steps": 3}, "warmup-steps is supported only by AgentRL's own trainer"),
        ({"trl": [1]}, r"trl must be a mapping, got \[1\]"),
        ({"trl": {"max_steps": 3}}, r"trl\.max_steps: set max_steps instead, outside of `trl`"),
        ({"trl": {"use_vllm": True}}, r"trl\.use_vllm: the run's inference servers generate"),
        ({"trl": {"hub_token": "x"}}, r"trl\.hub_token would be stored in a file; set HF_TOKEN"),
        ({"trl": {"per_device_train_batch_size": 5}}, "must divide the 12 rollouts of a step"),
        ({"temperature": 0}, "temperature 0: all rollouts of a question would be identical"),
        (
            {"agent_sampling": "agent"},
            "agent_sampling: TRL supports one temperature for all tokens",
        ),
        ({"max_stepz": 3}, "unknown flag.*max_stepz.*max_steps"),
    ],
)
def test_what_trl_cannot_use_is_refused_before_it_starts(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **config)


@needs_trl
def test_only_plain_values_are_handed_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trl: only plain values are supported"):
        build(tmp_path, trl={"beta": Path})


def test_without_trl_the_trainer_says_how_to_get_it(tmp_path: Path) -> None:
    python = tmp_path / "python-without-trl"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=rf"trl is not installed .* {python} -m pip install 'trl"):
        build(tmp_path, training_python=str(python))
