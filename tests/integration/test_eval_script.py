"""`eval_example.sh`: a checkpoint's score from real rollouts, and nothing else."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.demo_run import ROOT, RUN_NAME, eval_script_command, logs
from support.stored import tag_scores

from agentrl.evaluation.eval_scores import pass_at_k
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = pytest.mark.slow

NUM_QUESTIONS = 6
NUM_TRIES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the newest checkpoint of a run was evaluated."""
    folder = tmp_path_factory.mktemp("eval")
    for step in ("00000001", "00000002"):
        model = folder / "output/checkpoints" / step / "model"
        shutil.copytree(ROOT / "assets/demo/model", model)
    lines = (ROOT / "assets/demo/eval.jsonl").read_text().splitlines()[:NUM_QUESTIONS]
    entries = [{**json.loads(line), "tags": ["even", "odd"][n % 2]} for n, line in enumerate(lines)]
    (folder / "eval.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    command = eval_script_command(
        folder,
        config=ROOT / "assets/demo/grpo.yaml",  # its tools and its limits
        eval_file=folder / "eval.jsonl",
        eval_num_generations=NUM_TRIES,
        eval_temperature=1.0,
        train_file="none",  # an evaluation needs no training questions, and cares for none
        num_generations=1,
    )
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr + logs(folder)
    (folder / "said").write_text(done.stdout)
    return folder


@pytest.fixture
def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "output/eval.json").read_text())
    return found


async def test_the_script_writes_the_scores_that_the_records_have(
    folder: Path, result: dict[str, Any]
) -> None:
    with EmbeddedMongo(folder / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri(f"{RUN_NAME}-eval")) as store:
            scores = await tag_scores(store, "eval@0")
            assert await store.tasks.count() == NUM_QUESTIONS
            assert {record.min_version async for record in store.records.find()} == {0}
    assert len(scores) == NUM_QUESTIONS
    right = [sum(value or 0.0 for value in values) for values in scores.values()]
    assert all(len(values) == NUM_TRIES and None not in values for values in scores.values())
    assert result["reward_mean"] == pytest.approx(sum(right) / NUM_QUESTIONS / NUM_TRIES)
    total = result["total"]
    assert list(total["pass_at"]) == ["1", "2", "4"]
    for k, share in total["pass_at"].items():
        expected = [pass_at_k(NUM_TRIES, int(count), int(k)) for count in right]
        assert share == pytest.approx(sum(expected) / NUM_QUESTIONS)
    assert total["low"] < total["mean"] < total["high"]
    assert {name: row["num_tasks"] for name, row in result["by_tag"].items()} == {
        "even": NUM_QUESTIONS // 2,
        "odd": NUM_QUESTIONS // 2,
    }
    assert list(result["by_scorer"]) == ["exact"]


def test_the_script_takes_the_newest_checkpoint_and_trains_nothing(
    folder: Path, result: dict[str, Any]
) -> None:
    assert result["model"] == str(folder / "output/checkpoints/00000002/model")
    assert not (folder / "output/metrics.jsonl").exists()
    assert len(list((folder / "output/checkpoints").iterdir())) == 2
    said = (folder / "said").read_text()
    for words in ("pass@4", "tag even", "scorer exact", "mean reward", "95 %"):
        assert words in said
