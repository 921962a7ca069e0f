"""The end of a run: its result."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config.loading import load_config
from agentrl.launcher.console import run_report
from agentrl.launcher.console.run_report import finished, interrupted, print_locations
from agentrl.schema import Run
from agentrl.store import TrajectoryStore


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.25, 0.0, 0.5], "mean reward 0.250 (first step) -> 0.500 (last step)"),
        ([0.0, 0.5, None, 0.5, 1.0], "mean reward 0.250 (first 2 steps) -> 0.750 (last 2 steps)"),
    ],
)
def test_the_first_steps_are_compared_with_the_last(
    tmp_path: Path, store: TrajectoryStore, rewards: list[float | None], said: str
) -> None:
    config = load_config({"run_name": "demo", "output_dir": str(tmp_path)})
    (tmp_path / "summary.json").write_text(json.dumps({"reward_mean": rewards}))
    text = io.StringIO()
    print_locations(Console(file=text, width=80), config, store)
    first, *places = text.getvalue().splitlines()
    assert first == said
    assert {line[:18].strip() for line in places} >= {"log files", "inspect it"}
    assert all(line[17] == " " != line[18] for line in places)


@pytest.mark.parametrize(
    ("version", "saved", "again"),
    [(3, 3, ""), (1, 0, "; step 1 had no"), (5, 3, "; steps 4 to 5 had no checkpoint yet")],
)
def test_an_interrupted_run_says_what_is_computed_again(
    version: int, saved: int, again: str
) -> None:
    said = interrupted(7.1, Run(name="r", policy_version=version, saved_step=saved))
    assert said.startswith("interrupted after 7 s; all data is kept, and the same command resumes")
    assert again in said
    assert ("again" in said) == bool(again)
    within = Run(name="r", policy_version=version, saved_step=saved, phase="training")
    assert ("; step 4 was not finished and will be" in interrupted(7.1, within)) == (
        saved == version
    )


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        ({}, "completed", "finished in 7 s"),
        (
            {"train_file": "q.jsonl", "num_train_epochs": 2},
            "data_ended",
            "finished in 7 s, after step 9 of 20: all questions were used; --num_train_epochs 4 "
            "repeats them",
        ),
        (
            {},
            "data_ended",
            "finished in 7 s, after step 9 of 20: all questions were used; add some with `agentrl "
            "tasks add`",
        ),
    ],
)
def test_the_end_says_whether_questions_ran_out(
    tmp_path: Path, flags: dict[str, object], status: str, said: str
) -> None:
    config = load_config({"output_dir": str(tmp_path), "max_steps": 20, **flags})
    (tmp_path / "summary.json").write_text(json.dumps({"status": status, "steps": 9}))
    assert finished(config, 7.1) == said


def test_the_end_says_whether_the_last_steps_changed_nothing(tmp_path: Path) -> None:
    config = load_config({"output_dir": str(tmp_path), "max_steps": 9})
    summary = {"status": "completed", "steps": 9, "skipped_last": 2}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert finished(config, 7.1) == (
        "finished in 7 s; the last 2 steps changed nothing, because loss or gradient was not finite: "
        "the weights are those of step 7 (see `skipped` in metrics.jsonl)"
    )


async def test_only_a_long_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "SLOW_SECONDS", 0.02)
    text = io.StringIO()
    console = Console(file=text, width=80)
    async with run_report.report_if_slow(console, "quick"):
        pass
    async with run_report.report_if_slow(console, "slow"):
        await asyncio.sleep(0.1)
    assert text.getvalue() == "slow\n"
