"""How each process of a run ends when it is told to: in order, within a bound, nothing left."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness.started import END_SECONDS, Started, metrics, started
from support.demo_run import ROOT, RUN_NAME, logs, run_command
from support.patience import PATIENCE

from agentrl.runtime.processes.signals import INTERRUPTED, SAME_SIGNAL_SECONDS
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.checkpoint import latest_checkpoint

pytestmark = pytest.mark.slow


def words_of(command: str, folder: Path, **flags: object) -> list[str]:
    named = {"output_dir": folder / "output", "logs_dir": folder / "logs"} | flags
    argv = [sys.executable, "-m", "agentrl", command, "--run_name", RUN_NAME]
    return [*argv, *(str(word) for name, value in named.items() for word in (f"--{name}", value))]


def assert_ends_at_once(run: Started, children: list[psutil.Process]) -> None:
    """Wait for all, without a pause, and for five seconds of this thread's own processor time.

    Without load these are five seconds by the clock; load slows the thread as it slows the others.
    """
    began = time.thread_time()
    while run.process.poll() is None or psutil.wait_procs(children, timeout=0)[1]:
        assert time.thread_time() - began < 5


async def test_a_run_saves_the_step_hands_its_slots_back_and_can_be_resumed(tmp_path: Path) -> None:
    command = run_command(tmp_path, max_steps=40, save_steps=1000)
    with started(command, tmp_path) as run:
        run.until(lambda: metrics(tmp_path))
        assert run.end(signal.SIGTERM) == INTERRUPTED
        assert "the same command resumes the run" in run.said()
    assert "Traceback" not in run.said() + logs(tmp_path)
    saved = latest_checkpoint(tmp_path / "output")
    assert saved is not None
    assert saved.step == len(metrics(tmp_path))
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri(RUN_NAME)) as store:
            assert [one.id async for one in store.records.find(status="running")] == []
            assert {service.status for service in await store.services.all()} == {"down"}


SLOW_LOSS = """
import time
from pathlib import Path

SLOW = Path(__file__).with_name("slow")
DONE = []


def after(step):
    DONE.append(step)


def loss(inputs):
    if DONE and SLOW.exists():
        with SLOW.open("a") as passes:
            passes.write("x")
        time.sleep(5)
    return -inputs.advantages * inputs.policy_logprobs
"""


@pytest.mark.timeout(600)
async def test_ctrl_c_within_a_step_saves_the_last_one_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    own, slow = tmp_path / "own.py", tmp_path / "slow"
    own.write_text(SLOW_LOSS)
    slow.touch()
    functions = {"loss_calculator": f"{own}:loss", "on_step": f"{own}:after"}
    command = run_command(tmp_path, max_steps=2, save_steps=1000, max_tokens=2048, **functions)
    with started(command, tmp_path) as run:
        run.until(slow.read_text)
        assert run.end(signal.SIGINT) == INTERRUPTED
        assert "step 2 was not finished and will be computed again" in run.said()
    assert len(slow.read_text()) <= 2
    saved = latest_checkpoint(tmp_path / "output")
    assert saved is not None
    assert saved.step == len(metrics(tmp_path)) == 1
    slow.unlink()
    with started(command, tmp_path) as run:
        assert run.process.wait(PATIENCE) == 0, run.said() + logs(tmp_path)
    assert "Traceback" not in run.said() + logs(tmp_path)
    assert len(metrics(tmp_path)) == 2
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri(RUN_NAME)) as store:
            counts = [
                one.ledger["trainer"].trained_count
                async for one in store.ledger.find(status="trained")
            ]
    assert set(counts) == {1}


def test_a_second_signal_ends_a_run_at_once_that_waits_for_its_trainer(tmp_path: Path) -> None:
    with started(run_command(tmp_path, max_steps=40), tmp_path) as run:
        run.until(lambda: metrics(tmp_path))
        children, trainer = run.children(), run.child("agentrl train")
        trainer.suspend()
        run.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(2 * SAME_SIGNAL_SECONDS)
        run.process.send_signal(signal.SIGINT)
        assert_ends_at_once(run, children)
        assert run.process.returncode == -signal.SIGINT
    assert "a second signal exits immediately" in run.said()
    assert "Traceback" not in run.said()


def test_a_run_whose_launcher_is_killed_ends_within_seconds(tmp_path: Path) -> None:
    with started(run_command(tmp_path, max_steps=40), tmp_path) as run:
        run.until(lambda: metrics(tmp_path))
        children = run.children()
        run.process.kill()
        assert psutil.wait_procs(children, timeout=END_SECONDS / 2)[1] == []
    assert "Traceback" not in logs(tmp_path)


def test_a_closed_terminal_ends_a_run_in_order(tmp_path: Path) -> None:
    with started(run_command(tmp_path, max_steps=40, save_steps=1000), tmp_path) as run:
        run.until(lambda: metrics(tmp_path))
        assert run.end(signal.SIGHUP) == INTERRUPTED
    assert "Traceback" not in run.said() + logs(tmp_path)
    saved = latest_checkpoint(tmp_path / "output")
    assert saved is not None
    assert saved.step == len(metrics(tmp_path))


def test_a_run_started_with_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    with started(["nohup", *run_command(tmp_path, max_steps=40)], tmp_path) as run:
        run.until(lambda: metrics(tmp_path))
        run.process.send_signal(signal.SIGHUP)
        num_steps = len(metrics(tmp_path))
        run.until(lambda: len(metrics(tmp_path)) > num_steps)


def test_a_second_signal_leaves_nothing_of_a_run_for_longer_than_five_seconds(
    tmp_path: Path,
) -> None:
    with started(run_command(tmp_path, max_steps=40), tmp_path) as run:
        run.until(lambda: metrics(tmp_path))
        children = run.children()
        run.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(2 * SAME_SIGNAL_SECONDS)
        run.process.send_signal(signal.SIGINT)
        assert_ends_at_once(run, children)
        assert run.process.returncode == -signal.SIGINT


def test_a_trainer_that_is_ended_alone_does_not_pass_for_one_that_is_done(tmp_path: Path) -> None:
    with started(run_command(tmp_path, max_steps=40), tmp_path) as run:
        run.until(lambda: metrics(tmp_path))
        run.child("agentrl train").send_signal(signal.SIGTERM)
        assert run.process.wait(END_SECONDS) == INTERRUPTED
    assert "the same command resumes the run" in run.said()


@pytest.mark.parametrize("when", ["starting", "up"])
async def test_a_server_is_taken_out_and_ended(
    store: TrajectoryStore, mongo_uri: str, tmp_path: Path, when: str
) -> None:
    flags = {"model_name_or_path": ROOT / "assets/demo/model", "inference_threads": 1}
    database = {"db_connection_string": mongo_uri}
    command = words_of("serve", tmp_path, **flags, **database)
    with started(command, tmp_path) as serve:
        words = {"starting": "agentrl.plugins.engine", "up": " is up"}[when]
        serve.until(
            lambda: (
                words in serve.said()
                or any(words in " ".join(one.cmdline()) for one in serve.children())
            )
        )
        assert serve.end(signal.SIGTERM) == 0
    assert "Traceback" not in serve.said() + logs(tmp_path)


def test_an_evaluation_ends_with_all_that_it_started(tmp_path: Path) -> None:
    command = words_of(
        "eval",
        tmp_path,
        config=ROOT / "assets/demo/grpo.yaml",
        mongo_data_dir=tmp_path / "mongo",
        mongo_port=0,
        model_name_or_path=ROOT / "assets/demo/model",
        eval_num_generations=64,
    )
    log = tmp_path / "logs" / f"{RUN_NAME}-eval_eval_serve_0.log"
    with started(command, tmp_path) as evaluation:
        evaluation.until(lambda: log.exists() and " is up" in log.read_text())
        assert evaluation.end(signal.SIGINT) == INTERRUPTED
    assert "Traceback" not in evaluation.said() + logs(tmp_path)


def test_fine_tuning_saves_the_step_that_it_made_last(tmp_path: Path) -> None:
    talk = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    }
    (tmp_path / "talks.jsonl").write_text(200 * (json.dumps(talk) + "\n"))
    command = words_of(
        "sft",
        tmp_path,
        model_name_or_path=ROOT / "assets/demo/model",
        train_file=tmp_path / "talks.jsonl",
        num_train_epochs=1000,
        trainer_threads=1,
    )
    with started(command, tmp_path) as tuning:
        tuning.until(lambda: metrics(tmp_path))
        assert tuning.end(signal.SIGTERM) == INTERRUPTED
        assert "stopped after step" in tuning.said()
    assert "Traceback" not in tuning.said()
    saved = latest_checkpoint(tmp_path / "output")
    assert saved is not None
    assert saved.step == len(metrics(tmp_path))
