"""A run whose servers are killed and stopped: it goes on, and what it stored is right."""

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from support.demo_run import ROOT, logs, run_command
from support.patience import PATIENCE
from support.versions import check_versions

from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

NUM_STEPS = 16
HANG_SECONDS = 3.0
PUBLISH_SECONDS = 10.0
TIDY_SECONDS = 8.0
"""What a publication takes at most beyond its bound, to tidy up after servers that were lost."""
STEP_BOUND_SECONDS = 60.0
"""No step may wait longer, the time for a server to come back included."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def engines(run: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the run's engines in order of their start."""
    found = []
    for child in psutil.Process(run.pid).children(recursive=True):
        try:
            if "agentrl.plugins.engine" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.create_time())


def until_step(folder: Path, run: "subprocess.Popen[str]", step: int) -> None:
    metrics = folder / "output/metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and run.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not made: {logs(folder)}")


@pytest.mark.parametrize(
    ("weight_sync", "port"), [("disk", 33000), ("distributed", 33010)], ids=["disk", "distributed"]
)
async def test_run_survives_servers_that_die_and_hang(
    tmp_path: Path, weight_sync: str, port: int
) -> None:
    command = run_command(
        tmp_path,
        weight_sync=weight_sync,
        max_steps=NUM_STEPS,
        keep_policies=100,
        num_inference_servers=2,
        inference_port=port,
        server_hang_seconds=HANG_SECONDS,
        publish_timeout_seconds=PUBLISH_SECONDS,
    )
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        try:
            until_step(tmp_path, run, 2)
            first, second = engines(run)
            second.suspend()
            until_step(tmp_path, run, 4)
            first.kill()
            output, _ = run.communicate(timeout=240)
        finally:
            if run.poll() is None:
                run.terminate()
    assert run.returncode == 0, output + logs(tmp_path)
    metrics = (tmp_path / "output/metrics.jsonl").read_text()
    steps = [json.loads(line) for line in metrics.splitlines()]
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert max(sum(step["seconds"].values()) for step in steps) < STEP_BOUND_SECONDS
    published = [step["seconds"]["publish"] for step in steps]
    assert max(published) < PUBLISH_SECONDS + TIDY_SECONDS
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("short")) as store:
            records = [r.id async for r in store.records.find(status="scored", split="train")]
            turns = [await store.turns.of_record(record) for record in records]
    assert check_versions(turns, tmp_path / "output/policy") > 100
