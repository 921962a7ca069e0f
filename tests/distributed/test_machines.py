"""`agentrl run` on two machines, as its scripts start it: here both are this machine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from support.patience import PATIENCE
from support.training import Player, train_tasks

from agentrl.runtime.ports import free_port
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo
from agentrl.trainer.checkpoint import latest_checkpoint

Machine = subprocess.Popen[str]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]

REPOSITORY = Path(__file__).parents[2]
SCORES = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]] * 2


async def filled_run(mongod: EmbeddedMongo, model_path: Path, *, num_unplayed: int = 0) -> str:
    """The URI of a database with two steps' worth of the same finished groups."""
    uri = mongod.uri(f"machines_{uuid.uuid4().hex[:8]}")
    async with TrajectoryStore.connect(uri) as store:
        await store.ensure_schema()
        await store.tasks.add(train_tasks(len(SCORES) + num_unplayed, 3))
        await Player(model_path).play_groups(store, SCORES)
    return uri


def command(uri: str, model_path: Path, folder: Path, **flags: object) -> list[str]:
    settings = {
        "run_name": uri.partition("?")[0].rpartition("/")[2],
        "output_dir": folder / "output",
        "logs_dir": folder / "logs",
        "db_connection_string": uri,
        "model_name_or_path": model_path,
        "enable_sampling": "false",
        "num_generations": 3,
        "groups_per_step": 2,
        "learning_rate": 0.001,
        "max_staleness": 100,
        "max_steps": 2,
        "num_processes": 2,
        "trainer_threads": 1,
        **flags,
    }
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "agentrl", "run", *words]


@contextmanager
def started(argv: list[str], folder: Path, **variables: object) -> Iterator[Machine]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"machine{variables.get('MACHINE_RANK', 0)}.out"
    with path.open("w") as out:
        process = subprocess.Popen(
            argv,
            cwd=REPOSITORY,
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def machines(port: int, rank: int) -> dict[str, object]:
    return {
        "NUM_MACHINES": 2,
        "MACHINE_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def said(folder: Path) -> str:
    texts = [*folder.glob("*.out"), *(folder / "logs").glob("*.log")]
    return "".join(f"== {path.name}\n{path.read_text()[-3000:]}\n" for path in sorted(texts))


def figures(folder: Path) -> list[tuple[float, float]]:
    lines = (folder / "output/metrics.jsonl").read_text().splitlines()
    return [(step["loss"], step["grad_norm"]) for step in map(json.loads, lines)]


async def test_two_machines_train_what_two_ranks_of_one_train(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    uri = await filled_run(mongod, model_path)
    port = free_port()
    with started(command(uri, model_path, one, main_process_port=port), one) as alone:
        assert alone.wait(120) == 0, said(one)

    uri = await filled_run(mongod, model_path)
    argv, port = command(uri, model_path, two), free_port()
    with ExitStack() as stack:
        # The further machine comes first and waits.
        processes = [
            stack.enter_context(started(argv, two, **machines(port, rank))) for rank in (1, 0)
        ]
        assert [process.wait(120) for process in processes] == [0, 0], said(two)
    assert len(figures(two)) == 2
    for here, there in zip(figures(two), figures(one), strict=True):
        assert here == pytest.approx(there, rel=1e-5, abs=1e-7)
    written = yaml.safe_load((two / "output/config.yaml").read_text())
    assert written["num_processes"] == 2
    assert not {"num_machines", "machine_rank", "main_process_port"} & written.keys()
    names = {path.name.partition("_train_")[2] for path in (two / "logs").glob("*_train_*")}
    assert names == {"0.log", "1.log"}
    assert "the trainer ended" in (two / "machine1.out").read_text()


def waiting_command(uri: str, model_path: Path, folder: Path) -> list[str]:
    """A run whose trainer waits for samples after two steps: there is a server and no sampler."""
    flags = {"enable_sampling": "true", "num_samplers": 0, "inference_threads": 1, "max_steps": 9}
    return command(uri, model_path, folder, **flags)


async def two_steps(first: Machine, second: Machine, folder: Path) -> None:
    """Return when the machines have made two steps together."""
    deadline = time.monotonic() + PATIENCE
    metrics = folder / "output/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert first.poll() is second.poll() is None, said(folder)
        assert time.monotonic() < deadline, said(folder)
        await asyncio.sleep(0.2)


async def test_an_interrupted_machine_ends_its_own_processes_and_the_trainer_says_so(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path
) -> None:
    uri = await filled_run(mongod, model_path, num_unplayed=2)
    argv, port = waiting_command(uri, model_path, tmp_path), free_port()
    with (
        started(argv, tmp_path, **machines(port, 0)) as first,
        started(argv, tmp_path, **machines(port, 1)) as second,
    ):
        await two_steps(first, second, tmp_path)
        processes = psutil.Process(second.pid).children(recursive=True)
        second.send_signal(signal.SIGINT)
        assert second.wait(40) == 130, said(tmp_path)
        assert psutil.wait_procs(processes, timeout=1)[1] == []
        assert "interrupted after" in (tmp_path / "machine1.out").read_text()
        assert first.poll() is None, said(tmp_path)
        async with TrajectoryStore.connect(uri) as store:
            await Player(model_path).play_groups(store, SCORES[:2])
        assert first.wait(60) == 1, said(tmp_path)
        last = (tmp_path / "machine0.out").read_text().splitlines()[-1]
        assert "the trainer failed (exit 1)" in last
        assert "Connection closed by peer" in last


async def test_interrupting_the_first_machine_ends_the_trainer_on_all(
    mongod: EmbeddedMongo, model_path: Path, tmp_path: Path
) -> None:
    uri = await filled_run(mongod, model_path, num_unplayed=2)
    argv, port = waiting_command(uri, model_path, tmp_path), free_port()
    with (
        started(argv, tmp_path, **machines(port, 0)) as first,
        started(argv, tmp_path, **machines(port, 1)) as second,
    ):
        await two_steps(first, second, tmp_path)
        machines_of = [psutil.Process(machine.pid) for machine in (first, second)]
        processes = [child for one in machines_of for child in one.children(recursive=True)]
        first.send_signal(signal.SIGINT)
        assert first.wait(40) == 130, said(tmp_path)
        assert second.wait(40) == 0, said(tmp_path)
        assert psutil.wait_procs(processes, timeout=1)[1] == []
    checkpoint = latest_checkpoint(tmp_path / "output")
    assert checkpoint is not None
    assert checkpoint.step == len(figures(tmp_path))
