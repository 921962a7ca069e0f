"""A file of questions that was edited after the run began."""

import json
from pathlib import Path

import pytest

from agentrl.config.sections import DataSection
from agentrl.datasets.task_stream import append_tasks, train_tasks
from agentrl.errors import DatasetError
from agentrl.launcher.checks.question_checks import check_unchanged
from agentrl.store import TrajectoryStore


def section(folder: Path, *queries: str) -> DataSection:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"query": q, "answer": "1"}) + "\n" for q in queries))
    return DataSection(train_file=path)


async def test_a_changed_question_is_named_and_further_ones_are_welcome(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    config = section(tmp_path, "a", "b")
    await check_unchanged(config, store)
    await append_tasks(store, train_tasks(config, seed=0))
    await check_unchanged(config, store)
    await check_unchanged(section(tmp_path, "a", "b", "c"), store)
    with pytest.raises(
        DatasetError, match="'line2' already belongs to another question of the run, 'b'"
    ):
        await check_unchanged(section(tmp_path, "a", "new", "b"), store)
    await check_unchanged(DataSection(), store)


async def test_corrected_answers_of_a_run_are_noted(store: TrajectoryStore, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"query": q, "answer": a} for q, a in [("a", "1"), ("b", ["x", {"y": 2.5}]), ("c", 7)]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataSection(train_file=path, default_scorer="accept")
    await append_tasks(store, train_tasks(config, seed=0))
    assert await check_unchanged(config, store) == []
    rows[1]["answer"] = ["x"]
    rows[2]["answer"] = 8
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (note,) = await check_unchanged(config, store)
    assert "2 answers changed, the first that of 'line2'; the run keeps those that it read" in note
