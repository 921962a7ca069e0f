"""What is said while an evaluation goes on, and at its end."""

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console
from support.stored import claim, make_task, play

from agentrl.config.loading import load_config
from agentrl.evaluation.eval_scores import EvalMetrics, TaskScores, score_row
from agentrl.launcher import evaluation_run
from agentrl.launcher.console.run_report import print_inspection_commands
from agentrl.schema import Run
from agentrl.store import TrajectoryStore


async def test_an_evaluation_says_how_far_it_is(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_run, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(evaluation_run, "QUIET_SECONDS", 0.01)
    await store.runs.create(Run(name=store.database_name))
    tasks = [make_task(n, split="eval", tag="eval@0", num_generations=1) for n in range(2)]
    await store.tasks.add(tasks)
    text = io.StringIO()
    following = asyncio.create_task(evaluation_run.follow(Console(file=text, width=80), store))
    try:
        for words in ("0 of 2 questions answered", "1 of 2 questions answered"):
            async with asyncio.timeout(20):
                while words not in text.getvalue():
                    await asyncio.sleep(0.01)
            await play(store, await claim(store), score=1.0)
    finally:
        following.cancel()


@pytest.mark.parametrize("num_unscored", [0, 1])
def test_missing_scores_come_with_the_command_that_says_why(num_unscored: int) -> None:
    total = score_row([TaskScores([1.0, *[None] * num_unscored])])
    metrics = EvalMetrics(
        version=0, reward_mean=1.0, num_tasks=1, num_unscored=num_unscored, total=total
    )
    text = io.StringIO()
    evaluation_run.print_scores(Console(file=text, width=80), metrics, Path("output/config.yaml"))
    assert ("agentrl inspect failures --config output/config.yaml" in text.getvalue()) == bool(
        num_unscored
    )


@pytest.mark.parametrize(
    ("folder", "selection"),
    [
        (".agentrl/mongo/warm", "--run_name warm-eval"),
        ("elsewhere/data", "--config output/warm/eval_config.yaml"),
    ],
)
def test_an_evaluation_after_a_run_opens_as_printed(
    folder: str, selection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"run_name": "warm", "mongo_data_dir": str(tmp_path / folder)}
    config = evaluation_run.named_evaluation(load_config(flags))
    text = io.StringIO()
    path = Path("output/warm/eval_config.yaml")
    print_inspection_commands(Console(file=text, width=80), config, path)
    for command in ("inspect progress", "ui", "store up --show_password"):
        assert f"agentrl {command} {selection}" in text.getvalue()
    named = load_config({"run_name": "warm-eval"}).private_mongo_dir.absolute()
    assert (config.private_mongo_dir == named) == selection.startswith("--run_name")
