"""A run that nobody goes on with is `interrupted`, told by leases and heartbeats alone."""

import os
import subprocess
import sys

import pytest

from agentrl.runtime.processes.process_identity import new_lease_owner
from agentrl.schema import Run, SamplerInfo
from agentrl.schema.run import RunStatus
from agentrl.store import TrajectoryStore
from agentrl.store.repositories import liveness


@pytest.fixture
def dead_owner() -> str:
    """The name under which a process of this machine held leases before it was killed."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return new_lease_owner().replace(f":{os.getpid()}:", f":{process.pid}:")


async def state(store: TrajectoryStore) -> str:
    return (await store.reports.summary()).status


async def begin(store: TrajectoryStore, owner: str) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.trainer_leases.acquire("trainer", owner, 60)
    await store.runs.set_phase("loading")
    await store.runs.set_status("training")


async def test_a_run_is_training_while_its_trainer_lives(store: TrajectoryStore) -> None:
    await begin(store, new_lease_owner())
    assert await state(store) == "training"
    (trainer,) = await store.reports.live_processes()
    assert (trainer.kind, trainer.consumer) == ("trainer", "trainer")
    assert trainer.since is not None
    await store.trainer_leases.release("trainer")  # Ctrl-C
    assert await state(store) == "interrupted"


async def test_a_run_whose_trainer_was_killed_is_interrupted_at_once(
    store: TrajectoryStore, dead_owner: str
) -> None:
    await begin(store, dead_owner)
    await store.samplers.register(SamplerInfo(id=dead_owner, host="here", pid=1))
    assert await state(store) == "interrupted"
    # A trainer that is started again finds its samplers at work.
    await store.samplers.register(SamplerInfo(id=new_lease_owner(), host="here", pid=2))
    assert await state(store) == "training"


async def test_a_run_that_is_starting_again_is_not_interrupted(
    store: TrajectoryStore, dead_owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(store, dead_owner)
    await store.runs.set_phase("starting")
    assert await state(store) == "training"
    monkeypatch.setattr(liveness, "START_SECONDS", 0.0)  # it was killed while it started
    assert await state(store) == "interrupted"


@pytest.mark.parametrize("status", ["created", "completed", "no_signal", "failed"])
async def test_other_runs_keep_their_status(store: TrajectoryStore, status: RunStatus) -> None:
    await store.runs.create(Run(name=store.database_name, status=status))
    assert await state(store) == status
