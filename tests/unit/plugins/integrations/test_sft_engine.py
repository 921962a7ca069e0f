"""Supervised fine-tuning through AgentTrainer: what it checks and writes, and a run of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, DatasetError
from agentrl.plugins.integrations import AgentTrainer

TALK: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "honey: packs once 6 arrive?"},
        {"role": "assistant", "content": "<answer>19</answer>"},
    ]
}
CONFIG = {"run_name": "taught", "max_steps": 1, "eval_strategy": "no"}


def answer(task: Any, endpoint: Any) -> str:
    raise NotImplementedError


def build(tmp_path: Path, rows: Any, **changes: Any) -> AgentTrainer:
    arguments = {"config": CONFIG, "run_path": tmp_path, "train_engine_name": "sft", **changes}
    return AgentTrainer(answer, train_dataset=rows, **arguments)


def test_conversations_and_flags_are_written_for_the_fine_tuning(tmp_path: Path) -> None:
    trainer = build(tmp_path, [TALK], test_dataset=[TALK, TALK])
    assert json.loads((tmp_path / "train_data.jsonl").read_text()) == TALK
    assert len((tmp_path / "test_data.jsonl").read_text().splitlines()) == 2
    assert trainer.config.data.eval_file == tmp_path / "test_data.jsonl"
    with pytest.raises(ConfigError, match="dataset: missing; pass questions"):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "train_dataset: missing; pass conversations"),
        ([{"query": "q"}], 'train_dataset: line 1: expected an object with a list "messages"'),
        ([TALK, {"messages": []}], "train_dataset: line 2: contains no assistant message"),
    ],
)
def test_other_rows_are_refused(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DatasetError), match=message):
        build(tmp_path, rows)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_model_is_taught(tmp_path: Path) -> None:
    summary = build(tmp_path, [TALK] * 8).train()
    assert (summary["status"], summary["steps"]) == ("completed", 1)
    assert list((tmp_path / "output").glob("model/*.safetensors"))
