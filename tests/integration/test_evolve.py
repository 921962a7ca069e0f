"""The example that makes its tasks from tools: one round, as its file runs, with the demo's model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.plugins.integrations.question_rows import read_questions
from examples.shop.server import CATALOGUE, call_tool

ROOT = Path(__file__).parents[2]
FLAGS = {"max_steps": 1, "groups_per_step": 4, "num_generations": 8, "mongo_port": 0}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_round_makes_right_tasks_trains_on_them_and_evaluates_on_others(tmp_path: Path) -> None:
    for name in ("assets", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "examples/evolve/evolve.py", "1", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    train, held_out = (
        [*read_questions(tmp_path / f"output/evolve_0/{split}.jsonl")]
        for split in ("train", "eval")
    )
    assert report["tasks"] == len(train) + len(held_out)
    assert len(held_out) > 25
    assert len({task["query"] for task in train + held_out}) == report["tasks"]
    for task in train + held_out:
        lookup, operation = task["tag"].split()
        number = next(
            int(word.strip("?,")) for word in task["query"].split() if word.strip("?,").isdigit()
        )
        found = call_tool(CATALOGUE, lookup, {"item": task["query"].partition(":")[0]})
        numbers = {"a": int(found), "b": number}
        assert task["answer"] == call_tool(CATALOGUE, operation, numbers)
    assert {item(task) for task in train}.isdisjoint(item(task) for task in held_out)
    assert 0.0 < report["before"] < 1.0
    assert set(report["weights"]) == {task["tag"] for task in held_out}
    metrics = json.loads((tmp_path / "output/evolve_0/metrics.jsonl").read_text().splitlines()[0])
    assert metrics["grad_norm"] > 0


def item(task: dict[str, str]) -> tuple[str, str]:
    return task["tag"], task["query"].partition(":")[0]
