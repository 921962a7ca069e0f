"""A run goes on when one of its processes is killed: trainer, server supervisor, database."""

import json
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest
from harness.started import Started, metrics, started
from support.demo_run import logs, run_command

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

END_SECONDS = 200
NUM_STEPS = 14


def kill(run: Started, words: str) -> None:
    found = run.child(words)
    found.send_signal(signal.SIGKILL)
    psutil.wait_procs([found], timeout=10)


def has_more_steps(folder: Path, done: int) -> bool:
    return len(metrics(folder)) > done


async def test_a_run_rides_out_the_death_of_each_of_its_processes(tmp_path: Path) -> None:
    command = run_command(tmp_path, max_steps=NUM_STEPS)
    with started(command, tmp_path) as run:
        for words in ("agentrl train", "agentrl serve", "mongod --"):
            run.until(partial(has_more_steps, tmp_path, len(metrics(tmp_path))))
            kill(run, words)
        assert run.process.wait(END_SECONDS) == 0, run.said() + logs(tmp_path)
        said = run.said()
    for name in ("train_0", "serve_0", "mongod"):
        assert f"{name} was killed by SIGKILL; restarting it" in said
    summary = json.loads((tmp_path / "output/summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["steps"] == NUM_STEPS
    assert summary["restarts"] == {"mongod": 1, "serve_0": 1, "train_0": 1}
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("short")) as store:
            steps = [
                step
                async for data in store.ledger.find(status="trained")
                for step in data.ledger["trainer"].trained_at
            ]
            assert set(steps) == set(range(1, NUM_STEPS + 1))
            async for data in store.ledger.find(status="trained"):
                assert data.ledger["trainer"].trained_count == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_that_are_told_to_stop_alone_are_started_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    with started(run_command(tmp_path, max_steps=NUM_STEPS), tmp_path) as run:
        run.until(partial(has_more_steps, tmp_path, 0))
        stopped = [
            child
            for child in run.children()
            if any(f"agentrl {word}" in " ".join(child.cmdline()) for word in ("sample", "serve"))
        ]
        for child in stopped:
            child.send_signal(number)
        assert run.process.wait(END_SECONDS) == 0, run.said() + logs(tmp_path)
        said = run.said()
    assert len(stopped) > 1
    for name in ("sampler_0", "serve_0"):
        assert f"{name} exited with status 0; restarting it" in said
    summary = json.loads((tmp_path / "output/summary.json").read_text())
    assert summary["steps"] == NUM_STEPS


def test_a_trainer_that_fails_by_itself_ends_the_run(tmp_path: Path) -> None:
    command = run_command(tmp_path, report_to="tensorboard")
    (tmp_path / "output").mkdir()
    (tmp_path / "output/tensorboard").write_text("in the way of a folder")
    with started(command, tmp_path) as run:
        assert run.process.wait(END_SECONDS) == 1
        assert "the trainer failed" in run.said()
    assert "restarting it" not in run.said()


OWN_LOSS = """
import os
import sys

import torch

DONE = []


def after(step):
    DONE.append(step)


def loss(inputs):
    plain = -inputs.advantages * inputs.policy_logprobs
    if DONE:
        {instead}
    return plain
"""


def own_loss(folder: Path, instead: str, **flags: object) -> list[str]:
    """Return the command of a run of three steps whose loss does something else after the first."""
    module = folder / "own.py"
    module.write_text(OWN_LOSS.format(instead=instead))
    own = {"loss_calculator": f"{module}:loss", "on_step": f"{module}:after"}
    return run_command(folder, max_steps=3, save_steps=1, **own, **flags)


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ("sys.exit(0)", "own.py:17: SystemExit: 0 (it exits the program instead of returning)"),
        ("os._exit(0)", "the trainer exited with status 0 after step 1 of 3"),
    ],
)
def test_a_trainer_that_exits_with_zero_before_the_end_has_failed(
    tmp_path: Path, instead: str, said: str
) -> None:
    with started(own_loss(tmp_path, instead), tmp_path) as run:
        assert run.process.wait(END_SECONDS) == 1, run.said() + logs(tmp_path)
        text = run.said()
    assert said in text
    assert "finished in" not in text
    assert "restarting it" not in text
    assert len(metrics(tmp_path)) == 1


def test_a_run_whose_last_steps_changed_nothing_says_so(tmp_path: Path) -> None:
    with started(own_loss(tmp_path, "plain = plain * torch.nan"), tmp_path) as run:
        assert run.process.wait(END_SECONDS) == 0, run.said() + logs(tmp_path)
        text = run.said()
    assert "the last 2 steps changed nothing, because loss or gradient was not finite" in text
    assert "the weights are those of step 1" in text
