"""Adapters from publisher to real engines: nothing is paused, cut or taken away in use."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from support.adapters import make_adapter
from support.engines import Oracle, make_model, prompt, request

from agentrl.config.sections import InferenceSection, ModelSection, PublishSection
from agentrl.errors import InferenceError
from agentrl.inference import ServerPool
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.supervisor.server_supervisor import ServerPlan, ServerSupervisor
from agentrl.inference.weight_sync import AdapterNames, PolicyPublisher
from agentrl.inference.weight_sync.version_files import is_of_same_run
from agentrl.inference.wire import GenerateResult, adapter_version
from agentrl.models.lora import merge_adapter
from agentrl.runtime.ports import free_port
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

NUM_VERSIONS = 6
DATABASE = "adapters"


@dataclass
class Scene:
    """A publisher, and a supervised engine that serves its newest version."""

    store: TrajectoryStore
    publisher: PolicyPublisher
    supervisor: ServerSupervisor
    pool: ServerPool
    merged: list[Path]
    oracle: Oracle = field(default_factory=Oracle)
    version: int = 0

    def next_version(self) -> int:
        self.version += 1
        return self.version

    async def served(self, version: int) -> InferenceService:
        """Wait (bounded by the test's own timeout) until the server serves a version; tell the pool."""
        while True:
            for service in await self.store.services.all():
                is_there = service.status == "up" and service.policy_version == version
                heartbeat = self.supervisor.heartbeat
                seen = heartbeat and heartbeat.newest_adapter
                if is_there and seen == service.adapter is not None:
                    self.pool.update([service])
                    return service
            await asyncio.sleep(0.05)

    def check(self, result: GenerateResult, seed: int, version: int) -> None:
        """Every token is of the version, and the span says so."""
        (span,) = result.version_spans
        assert (span.version, span.start, span.end) == (version, 0, len(result.output_ids))
        expected = self.oracle.logprobs(self.merged[version], prompt(seed), result.output_ids)
        np.testing.assert_allclose(result.output_logprobs, expected, atol=1e-4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(
    mongod: EmbeddedMongo, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Scene]:
    async with TrajectoryStore.connect(mongod.uri(DATABASE)) as store:
        await store.ensure_schema()
        async with opened(store, tmp_path_factory.mktemp("adapters")) as scene:
            yield scene
        await store.drop_database()


@asynccontextmanager
async def opened(store: TrajectoryStore, tmp_path: Path) -> AsyncIterator[Scene]:
    model = make_model(tmp_path / "model", seed=1)
    await store.runs.create(Run(name=DATABASE))
    publisher = PolicyPublisher(
        store,
        tmp_path / "policy",
        publish=PublishSection(keep_policies=NUM_VERSIONS),
        inference=InferenceSection(),
        adapters=AdapterNames("run"),
    )
    merged = []
    for version in range(NUM_VERSIONS):
        directory = make_adapter(model, publisher.directory(version), seed=version)
        merged.append(merge_adapter(directory, model, tmp_path / f"merged{version}"))
    supervisor = ServerSupervisor(
        store,
        ServerPlan(url=None, model_path=model, log_prefix=f"{tmp_path}/engine_", seed=0),
        model=ModelSection(lora_rank=4),
        inference=InferenceSection(inference_port=free_port(), inference_threads=1),
        publish=PublishSection(),
    )
    stop = asyncio.Event()
    await publisher.announce(0)
    running = asyncio.create_task(supervisor.run(stop, max_restarts=2, start_seconds=50))
    try:
        async with ServerPool() as pool:
            scene = Scene(store, publisher, supervisor, pool, merged)
            await scene.served(0)
            yield scene
    finally:
        stop.set()
        await running
        await publisher.settle()


@pytest.mark.asyncio(loop_scope="module")
async def test_generations_finish_on_the_adapter_that_they_began_with(scene: Scene) -> None:
    first = scene.version
    slow = request(1, max_new_tokens=2500, stop_token_ids=())
    begun = asyncio.create_task(scene.pool.generate("slow", slow))
    service = await scene.served(first)
    async with SGLangClient(service.base_url) as client:
        while not (await client.loads()).num_running:
            await asyncio.sleep(0.01)
        names = []
        for version in (scene.next_version(), scene.next_version()):
            report = await scene.publisher.announce(version)
            assert list(report.paused_seconds.values()) == [0.0]
            names.append((await scene.served(version)).adapter)
            scene.check(await scene.pool.generate("new", request(version)), version, version)
        while set(await client.adapters()) != set(names):
            await asyncio.sleep(0.05)
    scene.check(await begun, 1, first)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_sampler_that_missed_versions_goes_on_with_the_newest(scene: Scene) -> None:
    late = await scene.served(scene.version)
    for version in (scene.next_version(), scene.next_version()):
        await scene.publisher.announce(version)
        await scene.served(version)
    newest = await scene.served(scene.version)
    async with SGLangClient(newest.base_url) as client:
        while late.adapter in await client.adapters():
            await asyncio.sleep(0.05)
    scene.pool.update([late])
    asking = asyncio.create_task(scene.pool.generate("late", request(5)))
    await asyncio.sleep(0)
    scene.pool.update([newest])
    scene.check(await asking, 5, scene.version)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_that_died_comes_back_with_the_newest_adapter(scene: Scene) -> None:
    service = await scene.served(scene.version)
    engine_of(int(service.base_url.rpartition(":")[2])).kill()
    await scene.publisher.announce(scene.next_version())
    service = await scene.served(scene.version)
    scene.check(await scene.pool.generate("again", request(6)), 6, scene.version)
    async with SGLangClient(service.base_url) as client:
        assert set(await client.adapters()) == {service.adapter}


def engine_of(port: int) -> psutil.Process:
    for child in psutil.Process().children(recursive=True):
        if any(c.laddr.port == port and c.status == "LISTEN" for c in child.net_connections()):
            return child
    raise AssertionError(f"no child listens on {port}")


def test_names_say_which_run_they_are_of_and_two_trainers_never_give_the_same() -> None:
    first, second, other = AdapterNames("run"), AdapterNames("run"), AdapterNames("run-b")
    assert first.of(4) != second.of(4)
    assert is_of_same_run(first.of(4), second.of(12))
    assert not is_of_same_run(first.of(4), other.of(4))
    assert not is_of_same_run("somebody-elses", first.of(4))


@pytest.mark.parametrize("name", ["plain", "run-v", "run-vx"])
def test_a_name_without_a_version_is_refused(name: str) -> None:
    with pytest.raises(InferenceError, match="version"):
        adapter_version(name)
