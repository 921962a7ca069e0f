"""Which ends of a process are mended by a restart, and a private mongod that comes back."""

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from agentrl.errors import StoreError
from agentrl.launcher.cluster.recovery import keep_running, last_error, was_interrupted
from agentrl.runtime.disk_space import full_disk
from agentrl.runtime.processes.child_processes import Child
from agentrl.runtime.processes.restarts import Restarts
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

REPORT = "E1122 api.py] failed (exitcode: {}) local_rank: 0 (pid: 7) of binary: /bin/python\n"


@pytest.mark.parametrize(
    ("status", "log", "mended"),
    [
        (-9, "step 3\n", True),
        (75, "agentrl train: MongoDB does not respond\n", True),
        (1, "agentrl train: losses stay non-finite\n", False),
        (2, "agentrl train: --lora_rank\n", False),
        (1, REPORT.format(-9), True),
        (1, REPORT.format(2), False),
    ],
)
def test_what_a_restart_can_mend(tmp_path: Path, status: int, log: str, mended: bool) -> None:
    path = tmp_path / "train_0.log"
    path.write_text(log)
    assert was_interrupted(Child("train_0", [], path), status) is mended


async def test_a_killed_mongod_comes_back_under_its_address_and_its_clients_go_on(
    tmp_path: Path,
) -> None:
    restarts = Restarts(2, first_delay_seconds=0.01)
    with EmbeddedMongo(tmp_path) as mongo:
        keeping = asyncio.create_task(keep_running(mongo, restarts))
        async with TrajectoryStore.connect(mongo.uri("run")) as store:
            await store.ensure_schema()
            first, port = mongo.pid, mongo.port
            os.kill(first, signal.SIGKILL)
            # In the middle of the outage: it waits, and is answered by the next incarnation.
            assert await store.tasks.count() == 0
            assert mongo.pid != first
            assert mongo.port == port
            assert restarts.total == 1
        keeping.cancel()
        await asyncio.wait({keeping})


async def test_a_mongod_that_ends_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedMongo(tmp_path / "data") as mongo:
        broken = tmp_path / "mongod"
        broken.write_text("#!/bin/sh\nexit 3\n")
        broken.chmod(0o755)
        monkeypatch.setenv("MONGOD_BINARY", str(broken))
        os.kill(mongo.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            with pytest.raises(
                StoreError, match=r"too many times .*exited during startup \(exit 3\)"
            ):
                await keep_running(mongo, Restarts(2, first_delay_seconds=0.01))


async def test_data_that_were_deleted_under_a_mongod_are_told(tmp_path: Path) -> None:
    with EmbeddedMongo(tmp_path / "data") as mongo:
        shutil.rmtree(tmp_path / "data")
        os.kill(mongo.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            with pytest.raises(StoreError, match=r"its data in .*/data was deleted"):
                await keep_running(mongo, Restarts(2, first_delay_seconds=0.01))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
async def test_a_mongod_without_room_is_told_as_a_full_disk(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", tmp_path], check=True)
    try:
        with EmbeddedMongo(tmp_path / "data") as mongo:
            assert full_disk(tmp_path / "data/not/yet/there") is None
            (tmp_path / "ballast").write_bytes(bytes(80 << 20))
            async with asyncio.timeout(20):
                with pytest.raises(StoreError, match=r"the disk of .*/data is full \(\d+ MB are"):
                    await keep_running(mongo, Restarts(2, first_delay_seconds=0.01))
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


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
        ("  + Exception Group Traceback\n    | KeyError: 'key'\n    +------\n", "KeyError: 'key'"),
    ],
)
def test_the_reason_is_quoted_and_not_the_launchers_report(
    tmp_path: Path, log: str, said: str
) -> None:
    path = tmp_path / "train_0.log"
    path.write_text(log)
    assert last_error(Child("train_0", [], path)) == said
