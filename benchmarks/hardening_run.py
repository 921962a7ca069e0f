"""Measures what a run loses through killed processes, clock steps of its database, and intruders."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from harness.attacks.stranger import as_stranger
from harness.mongod_programs import FAKETIME, mongod_with_clock
from harness.processes import ROOT
from harness.started import Started, metrics, started
from pydantic import SecretStr

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.launcher.cluster.recovery import keep_running
from agentrl.runtime.processes.restarts import Restarts
from agentrl.schema import MCPTask, Record
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

HOUR = 3600
LEASE_SECONDS = 1.2
NUM_LIVE = 8
NEW_STEPS = 2
"""Steps of a run after each kill; the second consists of rollouts that started after the kill."""
KEYS = {"AGENTRL_API_KEY": "key-for-data", "AGENTRL_ADMIN_KEY": "key-for-control"}
KILLED = {"trainer": "agentrl train", "keeper": "agentrl serve", "mongod": "mongod --"}


def killed_mongod() -> dict[str, Any]:
    """Return the seconds from a kill of the private mongod until it answers its clients again."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedMongo(Path(folder) / "mongo") as mongo:
        return asyncio.run(_kill_mongod(mongo))


async def _kill_mongod(mongo: EmbeddedMongo) -> dict[str, Any]:
    keeping = asyncio.create_task(keep_running(mongo, Restarts(2, first_delay_seconds=0.01)))
    async with TrajectoryStore.connect(mongo.uri("run")) as store:
        await store.ensure_schema()
        port = mongo.port
        start_time = time.monotonic()
        os.kill(mongo.pid, signal.SIGKILL)
        await store.tasks.count()
        seconds = time.monotonic() - start_time
    keeping.cancel()
    await asyncio.wait({keeping})
    return {"seconds": round(seconds, 1), "same_port": mongo.port == port}


def stranger() -> dict[str, Any]:
    """Return how many attempts of the user `nobody` on a private mongod are refused."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with EmbeddedMongo(Path(folder) / "mongo") as mongo:
            answers = as_stranger(mongo.port, Path(folder) / "mongo")
    return {"tried": len(answers), "refused": sum("refused 13" in line for line in answers)}


# --- clocks -----------------------------------------------------------------------------------


def clock_steps() -> dict[str, Any]:
    """Return how many live leases a clock step ends, and how long the leases of dead processes last."""
    found: dict[str, Any] = {}
    before = os.environ.get("MONGOD_BINARY")
    for name, seconds in (("forward", HOUR), ("back", -HOUR)):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            clock = folder / "offset"
            clock.write_text("+0")
            os.environ["MONGOD_BINARY"] = str(mongod_with_clock(folder, clock))
            try:
                with EmbeddedMongo(folder / "mongo") as mongo:
                    found[name] = asyncio.run(_step(mongo, clock, seconds))
            finally:
                del os.environ["MONGOD_BINARY"]
                if before is not None:
                    os.environ["MONGOD_BINARY"] = before
    return found


async def _step(mongo: EmbeddedMongo, clock: Path, seconds: int) -> dict[str, Any]:
    async with TrajectoryStore.connect(mongo.uri("run")) as store:
        await store.ensure_schema()
        await store.tasks.add(
            [MCPTask(id="train/0/q1", query="?", num_generations=NUM_LIVE + 1, answer="7")]
        )
        live = [await _claim(store, f"elsewhere:1:{number}") for number in range(NUM_LIVE)]
        dead = await _claim(store, "elsewhere:2:0")
        before = (await store.database.handle.command("hello"))["localTime"]
        await asyncio.to_thread(clock.write_text, f"{seconds:+d}")
        async with asyncio.timeout(10):
            while True:
                now = (await store.database.handle.command("hello"))["localTime"]
                if abs((now - before).total_seconds()) > HOUR / 2:
                    break
        start_time, freed, lost_leases = time.monotonic(), None, set()
        while time.monotonic() - start_time < 4 * LEASE_SECONDS:
            reaped = await store.groups.reap(3, lease_seconds=LEASE_SECONDS)
            if reaped.num_expired and freed is None:
                freed = round(time.monotonic() - start_time, 1)
            await asyncio.sleep(LEASE_SECONDS / 6)
            lost_leases |= await store.records.renew(
                [(one.id, one.fence) for one in live], LEASE_SECONDS
            )
        expired = await store.records.get(dead.id)
        assert expired is not None
        assert [one.ended_by for one in expired.attempts] == ["expired"]
    return {"live": NUM_LIVE, "lost": len(lost_leases), "dead_freed_seconds": freed}


async def _claim(store: TrajectoryStore, owner: str) -> Record:
    claimed = await store.records.claim(
        owner, lease_seconds=LEASE_SECONDS, admitted_groups=1000, max_attempts=3
    )
    assert claimed is not None
    return claimed[0]


# --- a run ------------------------------------------------------------------------------------


def run() -> dict[str, Any]:
    """Return the seconds until a run trains again after each kill, and until two SIGINTs end it."""
    found: dict[str, Any] = {}
    os.environ.update(KEYS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = ["agentrl", "run", "--run_name", "hard", "--config", ROOT / "assets/demo/grpo.yaml"]
        words += ["--output_dir", folder / "output", "--logs_dir", folder / "logs"]
        words += ["--mongo_data_dir", folder / "mongo", "--mongo_port", "0", "--max_steps", "1000"]
        words += ["--groups_per_step", "4", "--num_generations", "4", "--eval_strategy", "no"]
        words += ["--lease_seconds", "3", "--save_steps", "1", "--num_train_epochs", "1000"]
        with started([sys.executable, "-m", *map(str, words)], folder) as run:
            run.until(lambda: metrics(folder))
            for name, command in KILLED.items():
                found[f"{name}_seconds"] = _seconds_without(run, folder, command)
            found["restarts_said"] = run.said().count("restarting it")
            found["paused_seconds"] = asyncio.run(_pause(run))
            run.until(_more_steps(folder, len(metrics(folder)) + 1))
            found["interrupt_seconds"] = _interrupt(run)
    return found


async def _pause(run: Started) -> float:
    """Pause the server as an intruder with its key could; return the seconds until it resumes."""
    (server,) = [one for one in run.children() if "agentrl.plugins.engine" in one.cmdline()]
    (listening,) = [one for one in server.net_connections("tcp") if one.status == "LISTEN"]
    url = f"http://127.0.0.1:{listening.laddr.port}"
    data, control = (SecretStr(key) for key in KEYS.values())
    async with SGLangClient(url, api_key=data, admin_key=control) as client:
        await client.pause("in_place")
        start_time = time.monotonic()
        while True:
            if not await client.is_paused():
                return round(time.monotonic() - start_time, 1)
            await asyncio.sleep(0.1)


def _seconds_without(run: Started, folder: Path, command: str) -> float:
    killed = run.child(command)
    num_steps = len(metrics(folder))
    start_time = time.monotonic()
    killed.kill()
    run.until(_more_steps(folder, num_steps + NEW_STEPS))
    return round(time.monotonic() - start_time, 1)


def _more_steps(folder: Path, number: int) -> Callable[[], bool]:
    return lambda: len(metrics(folder)) >= number


def _interrupt(run: Started) -> float:
    children = run.children()
    run.process.send_signal(signal.SIGINT)
    time.sleep(1)  # signals in quick succession would count as one
    start_time = time.monotonic()
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGINT)
    run.process.wait(60)
    psutil.wait_procs(children, timeout=60)
    return round(time.monotonic() - start_time, 1)


if __name__ == "__main__":
    print(
        killed_mongod(), stranger(), clock_steps() if FAKETIME.exists() else None, run(), sep="\n"
    )
