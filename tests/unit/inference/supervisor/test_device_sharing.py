"""Supervisors of servers that take turns with a trainer, when the trainer dies or fails them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.engines import make_model, request

from agentrl.config.sections import InferenceSection, ModelSection, PublishSection
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.supervisor.server_supervisor import ServerPlan, ServerSupervisor
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.runtime.ports import free_port
from agentrl.schema import InferenceService, Run, ServiceStatus
from agentrl.store import TrajectoryStore

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux only"),
    pytest.mark.slow,
]
INFERENCE = InferenceSection(colocated=True, inference_threads=1)
PUBLISH = PublishSection(publish_timeout_seconds=5)


@asynccontextmanager
async def supervised(store: TrajectoryStore, model: Path, folder: Path) -> AsyncIterator[None]:
    """A supervisor at work, beside a run whose trainer has its lease."""
    supervisor = ServerSupervisor(
        store,
        ServerPlan(url=None, model_path=model, log_prefix=f"{folder}/engine_", seed=0),
        model=ModelSection(),
        inference=INFERENCE.model_copy(update={"inference_port": free_port()}),
        publish=PUBLISH,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop, max_restarts=2, start_seconds=50))
    try:
        yield
    finally:
        stop.set()
        await running


@pytest.fixture
async def publisher(store: TrajectoryStore, tmp_path: Path) -> PolicyPublisher:
    """Of a live trainer, with version 1 to be announced."""
    await store.runs.create(Run(name=store.database_name))
    await store.trainer_leases.acquire("trainer", "host:1:a", 60)
    made = PolicyPublisher(store, tmp_path / "policy", publish=PUBLISH, inference=INFERENCE)
    make_model(made.directory(1), seed=2)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", seed=1)


async def until(store: TrajectoryStore, status: ServiceStatus) -> InferenceService:
    """Wait (bounded by the test's own timeout) until the store's one server has a status."""
    while True:
        for service in await store.services.all():
            if service.status == status:
                return service
        await asyncio.sleep(0.05)


async def test_a_server_whose_trainer_died_is_woken_and_loses_nothing(
    store: TrajectoryStore, publisher: PolicyPublisher, model: Path, tmp_path: Path
) -> None:
    async with supervised(store, model, tmp_path):
        service = await until(store, "up")
        await publisher.announce(1)
        async with SGLangClient(service.base_url) as client:
            running = asyncio.create_task(
                client.generate(request(1, max_new_tokens=400, ignore_eos=True))
            )
            while (await client.loads()).num_running == 0:
                await asyncio.sleep(0.01)
            await store.trainer_leases.set_has_device(True)
            await publisher.put_to_sleep()
            # While the trainer lives, its servers sleep: several heartbeats long.
            done, _ = await asyncio.wait({running}, timeout=3)
            assert not done
            assert (await store.services.all())[0].status == "asleep"
            await store.trainer_leases.release("trainer")
            woken = await until(store, "up")
            got = await running
    assert woken.started_at == service.started_at
    assert woken.policy_version == 1
    assert len(got.output_ids) == 400
    assert {span.version for span in got.version_spans} == {1}


async def test_a_server_that_failed_on_its_way_to_sleep_is_started_again_when_there_is_room(
    store: TrajectoryStore, publisher: PolicyPublisher, model: Path, tmp_path: Path
) -> None:
    async with supervised(store, model, tmp_path):
        service = await until(store, "up")
        await publisher.announce(1)
        await store.trainer_leases.set_has_device(True)
        await store.services.set_status(service.id, status="down", error="it was too slow")
        async with SGLangClient(service.base_url) as client:
            while await client.health():
                await asyncio.sleep(0.05)
            await asyncio.sleep(2)
            assert not await client.health()  # the trainer has the device
            await store.trainer_leases.set_has_device(False)
            again = await until(store, "up")
            assert again.started_at != service.started_at
            assert (await client.model_info()).weight_version == 1


async def test_a_server_that_was_left_half_awake_is_started_again(
    store: TrajectoryStore, publisher: PolicyPublisher, model: Path, tmp_path: Path
) -> None:
    async with supervised(store, model, tmp_path):
        service = await until(store, "up")
        await publisher.announce(1)
        await publisher.put_to_sleep()
        assert await store.services.claim_sleeping(service.id)  # whoever did this died
        await until(store, "down")
        again = await until(store, "up")
        async with SGLangClient(again.base_url) as client:
            assert len((await client.generate(request(1))).output_ids)
    assert again.started_at != service.started_at
