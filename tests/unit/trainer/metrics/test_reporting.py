import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from agentrl.evaluation.eval_scores import EvalMetrics
from agentrl.trainer.metrics.history import History, StepMetrics
from agentrl.trainer.metrics.metrics_file import append_metrics, rewind_metrics
from agentrl.trainer.metrics.reporting import (
    draw_rewards,
    summarize,
    write_summary,
)


def step(number: int, reward: float | None) -> StepMetrics:
    return StepMetrics(
        step=number,
        reward_mean=reward,
        num_groups=1,
        num_records=2,
        num_trained_records=1,
        loss=None,
        grad_norm=None,
        learning_rate=0.0,
        num_output_tokens=10,
        staleness={1: 2},
    )


def test_the_summary_names_every_step_and_both_evaluations(tmp_path: Path) -> None:
    history = History(steps=[step(1, 0.25), step(2, None)], seconds={"total": 1.23456})
    history.evals = [
        EvalMetrics(version=0, reward_mean=0.5, num_tasks=2),
        EvalMetrics(version=2, reward_mean=0.75, num_tasks=2),
    ]
    path = write_summary(tmp_path, summarize(history, run_name="demo", status="completed"))
    summary = json.loads(path.read_text())
    assert (summary["steps"], summary["reward_mean"]) == (2, [0.25, None])
    assert summary["eval_reward"] == {"before": 0.5, "after": 0.75}
    assert summary["tokens"]["sampled"] == 20
    assert summary["staleness"] == {"mean": 1.0, "max": 1, "histogram": {"1": 4}}
    assert summary["seconds"] == {"total": 1.235}
    assert summary["versions"]["policy"] == 2


def test_the_summary_counts_the_last_steps_that_changed_nothing() -> None:
    skipped = {1, 4, 5}
    steps = [
        step(n, 0.5).model_copy(update={"skipped": "non_finite_loss" if n in skipped else None})
        for n in range(1, 6)
    ]
    summary = summarize(History(steps=steps), run_name="demo", status="completed")
    assert summary["skipped_last"] == 2


def test_a_run_with_one_evaluation_has_no_reward_after() -> None:
    history = History(evals=[EvalMetrics(version=0, reward_mean=0.5, num_tasks=2)])
    summary = summarize(history, run_name="demo", status="stopped")
    assert summary["eval_reward"] == {"before": 0.5, "after": None}


def test_metrics_go_back_to_the_steps_of_the_checkpoint(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        append_metrics(tmp_path, step(number, 0.5))
    rewind_metrics(tmp_path, History(steps=[step(1, 0.5)]))
    append_metrics(tmp_path, step(2, 0.75))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward_mean"]) for line in lines] == [(1, 0.5), (2, 0.75)]


def test_the_picture_is_drawn_with_and_without_points(tmp_path: Path) -> None:
    history = History()
    assert draw_rewards(tmp_path, history, run_name="demo").stat().st_size > 1000
    history.steps = [step(1, 0.25), step(2, None), step(3, 0.5)]
    history.evals = [EvalMetrics(version=0, reward_mean=0.3, num_tasks=2)]
    picture = draw_rewards(tmp_path, history, run_name="demo")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Figure, path: Path, **__: object) -> None:
        path.write_bytes(b"\x89PNG")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space left"):
        draw_rewards(tmp_path, History(), run_name="demo")
    assert list(tmp_path.iterdir()) == []
