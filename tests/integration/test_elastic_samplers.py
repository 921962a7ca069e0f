"""Samplers that come and go by hand while a run goes on."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from support.demo_run import ROOT, config_path, database_uri, logs, run_command
from support.patience import PATIENCE

from agentrl.schema import Attempt, SamplerInfo
from agentrl.store import TrajectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


async def wait_for_sampler(store: TrajectoryStore, pid: int) -> SamplerInfo:
    """Wait until the sampler has finished slots and holds others."""
    async with asyncio.timeout(PATIENCE):
        while True:
            for info in await store.samplers.all():
                if info.pid == pid and info.num_finished > 0 and info.num_running > 0:
                    return info
            await asyncio.sleep(0.05)


async def wait_for_config(folder: Path) -> None:
    async with asyncio.timeout(PATIENCE):
        while not (folder / "output/metrics.jsonl").exists():
            await asyncio.sleep(0.1)


async def attempts_of(store: TrajectoryStore, pid: int) -> list[Attempt]:
    return [
        attempt
        async for record in store.records.find(split="train")
        for attempt in record.attempts
        if f":{pid}:" in attempt.owner
    ]


async def test_a_third_sampler_joins_at_once_and_hands_its_slots_back_on_sigterm(
    tmp_path: Path,
) -> None:
    run = await asyncio.create_subprocess_exec(
        *run_command(tmp_path, max_steps=12, num_generations=8),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        await wait_for_config(tmp_path)
        third = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentrl", "sample"),
            *("--config", str(config_path(tmp_path))),
            cwd=ROOT,
        )
        async with TrajectoryStore.connect(database_uri(tmp_path)) as store:
            await wait_for_sampler(store, third.pid)
            third.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(third.wait(), PATIENCE) == 0
            attempts = await attempts_of(store, third.pid)
            finished = [a for a in attempts if a.ended_by == "finished"]
            released = [a for a in attempts if a.ended_by == "released"]
            assert finished
            assert released
            assert len(finished) + len(released) == len(attempts)
        output, _ = await run.communicate()
        assert run.returncode == 0, output.decode() + logs(tmp_path)
    finally:
        if run.returncode is None:
            run.send_signal(signal.SIGTERM)
            await run.wait()
