"""The end of a run: its result, and what is quoted of a failed trainer's log."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config.loading import load_config
from agentrl.launcher.console import run_report
from agentrl.launcher.console.run_report import finished, last_error, print_locations
from agentrl.runtime.processes.child_processes import Child
from agentrl.store import TrajectoryStore

LAUNCHERS_REPORT = """\
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
agentrl FAILED
------------------------------------------------------------
  exitcode  : 1 (pid: 7)
  error_file: <N/A>
============================================================
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("step 1\nagentrl train: no space left\n", "agentrl train: no space left"),
        (f"agentrl train: no space left\n{LAUNCHERS_REPORT}", "agentrl train: no space left"),
        (
            f"[rank0]: Traceback\n[rank0]: RuntimeError: it closed\n{LAUNCHERS_REPORT}",
            "RuntimeError: it closed",
        ),
        ("ValueError: old\ntorch.OutOfMemoryError: big\n", "torch.OutOfMemoryError: big"),
        ("Killed\n", "Killed"),
    ],
)
def test_the_reason_is_quoted_and_not_the_launchers_report(
    tmp_path: Path, log: str, said: str
) -> None:
    path = tmp_path / "train_0.log"
    path.write_text(log)
    assert last_error(Child("train_0", [], path)) == said


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


async def test_only_a_long_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_report, "SLOW_SECONDS", 0.02)
    text = io.StringIO()
    console = Console(file=text, width=80)
    async with run_report.report_if_slow(console, "quick"):
        pass
    async with run_report.report_if_slow(console, "slow"):
        await asyncio.sleep(0.1)
    assert text.getvalue() == "slow\n"
