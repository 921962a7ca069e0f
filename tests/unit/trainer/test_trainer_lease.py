import subprocess
import sys
import time

import pytest

from agentrl.errors import TrainerBusy
from agentrl.runtime.processes.process_identity import is_alive, new_lease_owner
from agentrl.schema import Run
from agentrl.store import TrajectoryStore
from agentrl.trainer.trainer_lease import trainer_lease


@pytest.fixture
async def run_store(store: TrajectoryStore) -> TrajectoryStore:
    await store.runs.create(Run(name=store.database_name))
    return store


def dead_owner() -> str:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    host, _, suffix = new_lease_owner().rsplit(":", 2)
    return f"{host}:{ended.pid}:{suffix}"


async def test_a_dead_trainer_is_taken_over_from_at_once(run_store: TrajectoryStore) -> None:
    async with TrajectoryStore.connect(run_store.database.uri, run_store.database_name) as other:
        await other.trainer_leases.acquire("trainer", dead_owner(), 60)
    started = time.monotonic()
    async with trainer_lease(run_store, "trainer", lease_seconds=60):
        assert time.monotonic() - started < 30
        run = await run_store.runs.get()
        assert run is not None
        assert is_alive(run.trainer_leases["trainer"].owner)


async def test_a_silent_trainer_elsewhere_is_waited_out(run_store: TrajectoryStore) -> None:
    async with TrajectoryStore.connect(run_store.database.uri, run_store.database_name) as other:
        await other.trainer_leases.acquire("trainer", "elsewhere:1:0-a", 1.5)
    async with trainer_lease(run_store, "trainer", lease_seconds=3):
        run = await run_store.runs.get()
        assert run is not None
        assert run.trainer_leases["trainer"].owner.startswith(new_lease_owner().rsplit("-", 1)[0])


async def test_a_live_trainer_is_not_waited_for(run_store: TrajectoryStore) -> None:
    async with TrajectoryStore.connect(run_store.database.uri, run_store.database_name) as other:
        await other.trainer_leases.acquire("trainer", new_lease_owner(), 60)
        with pytest.raises(TrainerBusy):
            async with trainer_lease(run_store, "trainer", lease_seconds=60):
                pytest.fail("two trainers at once")


async def test_a_released_lease_is_free(run_store: TrajectoryStore) -> None:
    async with trainer_lease(run_store, "trainer", lease_seconds=60):
        pass
    async with TrajectoryStore.connect(run_store.database.uri, run_store.database_name) as other:
        await other.trainer_leases.acquire("trainer", "elsewhere:1:0-a", 60)
