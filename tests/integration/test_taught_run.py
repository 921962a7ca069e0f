"""A run that a teacher joins, with all processes for real; the teacher is killed while it computes."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.demo_run import ROOT, database_uri, logs, run_command
from support.patience import PATIENCE

from agentrl.schema.turn import token_versions
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

NUM_STEPS, GROUPS_PER_STEP, NUM_GENERATIONS = 3, 2, 4
MODEL = ROOT / "assets/demo/model"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * PATIENCE)]


@asynccontextmanager
async def started(command: list[str]) -> AsyncIterator[Process]:
    """Start a process, and end it with the block if it still runs."""
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=STDOUT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def output_of(process: Process) -> str:
    output, _ = await asyncio.wait_for(process.communicate(), 2 * PATIENCE)
    return output.decode()


def teach_command(folder: Path) -> list[str]:
    words = ("teach", str(folder / "output"), "--teacher", f"big={MODEL}")
    return [sys.executable, "-m", "agentrl", *words]


async def stop_at_work(process: Process, store: TrajectoryStore) -> None:
    """Stop a teacher at a moment when it has claimed records that it has not taught."""
    async with asyncio.timeout(2 * PATIENCE):
        while True:
            if await num_claimed(store):
                os.kill(process.pid, signal.SIGSTOP)
                await asyncio.sleep(0.2)  # what it has sent arrives
                if await num_claimed(store):
                    return
                os.kill(process.pid, signal.SIGCONT)
            assert process.returncode is None
            await asyncio.sleep(0.02)


async def num_claimed(store: TrajectoryStore) -> int:
    return await store.database["record_data"].count_documents({"teaching.big": {"$ne": None}})


async def test_a_killed_teacher_is_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    run_of = run_command(
        tmp_path,
        advantage_estimator="opd",
        teachers="big",
        max_steps=NUM_STEPS,
        groups_per_step=GROUPS_PER_STEP,
        num_generations=NUM_GENERATIONS,
    )
    async with started(run_of) as run:
        async with asyncio.timeout(2 * PATIENCE):
            while not (tmp_path / "output/metrics.jsonl").exists():
                assert run.returncode is None, logs(tmp_path)
                await asyncio.sleep(0.1)
        async with started(teach_command(tmp_path)) as first:
            async with TrajectoryStore.connect(database_uri(tmp_path)) as store:
                await stop_at_work(first, store)
            servers = psutil.Process(first.pid).children(recursive=True)
            first.kill()
            await first.wait()
        assert servers
        assert psutil.wait_procs(servers, timeout=30)[1] == []
        async with started(teach_command(tmp_path)) as second:
            output = await output_of(run)
            assert run.returncode == 0, output + logs(tmp_path)
            taught = await output_of(second)
            assert second.returncode == 0, taught
    summary = json.loads((tmp_path / "output/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", NUM_STEPS)
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri("short")) as store:
            await assert_all_is_taught(store)


async def assert_all_is_taught(store: TrajectoryStore) -> None:
    """What was trained on has the teacher's numbers, which are the policy's own of version 0."""
    data = await store.database["record_data"].find({"ledger.trainer": {"$ne": None}}).to_list()
    assert len(data) == NUM_STEPS * GROUPS_PER_STEP * NUM_GENERATIONS
    assert all("big" in one["taught"] for one in data)
    entries = [one["ledger"]["trainer"] for one in data]
    assert {entry["step"] for entry in entries} == set(range(1, NUM_STEPS + 1))
    assert {entry["trained_count"] for entry in entries} <= {0, 1}
    reasons = {entry["reason"] for entry in entries}
    assert "no_teacher" not in reasons
    turns = await store.turns.get_many([turn for one in data for turn in one["turn_ids"]])
    of_start = [turn for turn in turns if set(token_versions(turn)) == {0}]
    assert of_start
    for turn in of_start:
        np.testing.assert_allclose(
            turn.teacher_logprobs["big"], turn.output_logprobs, rtol=0, atol=1e-4
        )
