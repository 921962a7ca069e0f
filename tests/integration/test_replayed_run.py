"""Steps of demos made again after their trainer was killed: from the run, and from a bundle."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.demo_run import ROOT, RUN_NAME, logs

NUM_STEPS = 10
KILLED_AFTER = 5
SAVED_EVERY = 3
"""The checkpoint before the kill is a step behind: that step is trained twice."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "MONGODB_URI"}


def last_step(metrics: Path) -> int:
    """Return the last step that was recorded; 0 before the first."""
    text = metrics.read_text() if metrics.exists() else ""
    lines = text.rpartition("\n")[0].splitlines()  # the last one may be half written
    return max((json.loads(line).get("step", 0) for line in lines), default=0)


def kill_the_trainer(run: "subprocess.Popen[bytes]", metrics: Path) -> None:
    """Kill the trainer with SIGKILL once the run has made some steps."""
    deadline = time.monotonic() + 300
    while last_step(metrics) < KILLED_AFTER:
        assert run.poll() is None, "the run ended before its trainer could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (trainer,) = (
        child
        for child in psutil.Process(run.pid).children(recursive=True)
        if child.cmdline()[1:4] == ["-m", "agentrl", "train"]
    )
    trainer.kill()


def agentrl(folder: Path, *words: str) -> str:
    """Run a command in a folder and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", *words],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        ("--config", "assets/demo/grpo.yaml"),
        ("--config", "assets/demo/hybrid.yaml"),
        ("--config", "assets/demo/vision.yaml"),
        ("--config", "assets/demo/grpo.yaml", "--lora_rank", "8"),
    ],
    ids=["demo", "hybrid", "vision", "adapter"],
)
def test_steps_are_equal_bit_for_bit_after_their_trainer_was_killed(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    # As a user types it, with the flags of the demo itself.
    words = ["run", flags[0], str(ROOT / flags[1]), *flags[2:], "--run_name", RUN_NAME]
    words += ["--max_steps", str(NUM_STEPS), "--save_steps", str(SAVED_EVERY)]
    words += ["--mongo_port", "0", "--eval_strategy", "no", "--logs_dir", str(tmp_path / "logs")]
    with (tmp_path / "run.log").open("wb") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "agentrl", *words],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=log,
            stderr=log,
        )
    kill_the_trainer(run, tmp_path / f"output/{RUN_NAME}/metrics.jsonl")
    assert run.wait(600) == 0, logs(tmp_path)
    summary = json.loads((tmp_path / f"output/{RUN_NAME}/summary.json").read_text())
    assert summary["restarts"]["train_0"] == 1
    steps = list(range(1, NUM_STEPS + 1))
    found = json.loads(agentrl(tmp_path, "replay", RUN_NAME, "--step", f"1-{NUM_STEPS}", "--json"))
    assert_equal(found, steps)
    bundle = tmp_path / "steps.tar.gz"
    wanted = ("--steps", f"{KILLED_AFTER}-{NUM_STEPS}", "--out", str(bundle))
    agentrl(tmp_path, "store", "bundle", RUN_NAME, *wanted)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = json.loads(agentrl(elsewhere, "replay", str(bundle), "--json"))
    assert_equal(found, steps[KILLED_AFTER - 1 :])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_step_before_a_resume_with_other_flags_is_equal(tmp_path: Path) -> None:
    words = ["run", "--config", str(ROOT / "assets/demo/grpo.yaml"), "--run_name", RUN_NAME]
    words += ["--save_steps", "2", "--mongo_port", "0", "--eval_strategy", "no"]
    words += ["--save_total_limit", "9", "--logs_dir", str(tmp_path / "logs")]
    agentrl(tmp_path, *words, "--max_steps", "4")
    changed = ("--learning_rate", "1e-4", "--loss_calculator", "REINFORCE")
    agentrl(tmp_path, *words, "--max_steps", "6", *changed)
    for steps in (range(2, 5), range(5, 7)):
        span = f"{steps[0]}-{steps[-1]}"
        found = json.loads(agentrl(tmp_path, "replay", RUN_NAME, "--step", span, "--json"))
        assert_equal(found, list(steps))
    refused = subprocess.run(
        [sys.executable, "-m", "agentrl", "replay", RUN_NAME, "--step", "4-5"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "resumed with other flags before step 5; replay the steps up to 4" in refused.stderr


def assert_equal(found: dict[str, Any], steps: list[int]) -> None:
    """Compare what `agentrl replay --json` said with steps that came out bit for bit."""
    assert [(one["step"], one["equal"], one["largest_difference"]) for one in found["steps"]] == [
        (step, True, 0.0) for step in steps
    ]
