"""`--fresh --delete_existing` beside a run of the same name."""

import socket
from pathlib import Path

import pytest
from support.stored import make_task

from agentrl.config.sections import RunSection
from agentrl.errors import StoreError
from agentrl.launcher.checks.preflight import check_name_is_free
from agentrl.runtime.processes.process_identity import new_lease_owner
from agentrl.schema import InferenceService, Run, SamplerInfo
from agentrl.store import TrajectoryStore


async def live_run(store: TrajectoryStore, output_dir: Path) -> RunSection:
    name = store.database_name
    await store.runs.create(Run(name=name, config={}))
    await store.tasks.add([make_task(0)])
    return RunSection(run_name=name, fresh=True, delete_existing=True, output_dir=output_dir)


def sampler(owner: str) -> SamplerInfo:
    return SamplerInfo(id=owner, host=socket.gethostname(), pid=1)


async def test_a_live_trainer_keeps_its_run(store: TrajectoryStore, tmp_path: Path) -> None:
    section = await live_run(store, tmp_path)
    owner = new_lease_owner()
    await store.trainer_leases.acquire("trainer", owner, 60)
    with pytest.raises(StoreError, match=rf"{owner} trains it as 'trainer', with a lease until"):
        await check_name_is_free(section, store)
    assert await store.tasks.count() == 1
    assert tmp_path.exists()


async def test_a_live_sampler_and_a_live_server_keep_their_run(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    section = await live_run(store, tmp_path)
    info = sampler(new_lease_owner())
    await store.samplers.register(info)
    with pytest.raises(StoreError, match=rf"sampler {info.id} has been active since 20"):
        await check_name_is_free(section, store)
    await store.samplers.register(info.model_copy(update={"status": "stopped"}))
    server = InferenceService(id="h:1", base_url="http://h:1", backend="embedded", model_path="m")
    await store.services.register(server)
    with pytest.raises(StoreError, match="inference server h:1 has been active since 20"):
        await check_name_is_free(section, store)
    assert await store.tasks.count() == 1


async def test_a_run_whose_processes_were_killed_is_deleted(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    section = await live_run(store, tmp_path)
    host, _, rest = new_lease_owner().rsplit(":", 2)
    killed = f"{host}:999999999:{rest}"
    await store.samplers.register(sampler(killed))
    await store.trainer_leases.acquire("trainer", killed, 60)
    claimed = await store.records.claim(killed, lease_seconds=60, admitted_groups=1, max_attempts=3)
    assert claimed is not None
    await check_name_is_free(section, store)
    assert await store.tasks.count() == 0
    assert not tmp_path.exists()
