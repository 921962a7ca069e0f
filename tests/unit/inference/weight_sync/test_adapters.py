"""Adapters from publisher to real engines: nothing is paused, cut or taken away in use."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
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

NUM_VERSIONS = 4


@dataclass
class Scene:
    """A publisher, and a supervised engine that serves version 0."""

    store: TrajectoryStore
    publisher: PolicyPublisher
    supervisor: ServerSupervisor
    pool: ServerPool
    merged: list[Path]
    oracle: Oracle = field(default_factory=Oracle)

    async def served(self, version: int) -> InferenceService:
        """Wait (bounded by the test's own timeout) until the server serves a version; tell the pool."""
        while True:
            for service in await self.store.services.all():
                is_there = service.status == "up" and service.policy_version == version
                if is_there and self.supervisor.newest_adapter == service.adapter is not None:
                    self.pool.update([service])
                    return service
            await asyncio.sleep(0.05)

    def check(self, result: GenerateResult, seed: int, version: int) -> None:
        """Every token is of the version, and the span says so."""
        (span,) = result.version_spans
        assert (span.version, span.start, span.end) == (version, 0, len(result.output_ids))
        expected = self.oracle.logprobs(self.merged[version], prompt(seed), result.output_ids)
        np.testing.assert_allclose(result.output_logprobs, expected, atol=1e-4)


@pytest.fixture
async def scene(store: TrajectoryStore, tmp_path: Path) -> AsyncIterator[Scene]:
    model = make_model(tmp_path / "model", seed=1)
    await store.runs.create(Run(name=store.database_name))
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
            opened = Scene(store, publisher, supervisor, pool, merged)
            await opened.served(0)
            yield opened
    finally:
        stop.set()
        await running
        await publisher.settle()


async def test_generations_finish_on_the_adapter_that_they_began_with(scene: Scene) -> None:
    slow = request(1, max_new_tokens=2500, stop_token_ids=())
    begun = asyncio.create_task(scene.pool.generate("slow", slow))
    service = await scene.served(0)
    async with SGLangClient(service.base_url) as client:
        while not (await client.loads()).num_running:
            await asyncio.sleep(0.01)
        names = []
        for version in (1, 2):
            report = await scene.publisher.announce(version)
            assert list(report.paused_seconds.values()) == [0.0]
            names.append((await scene.served(version)).adapter)
            scene.check(await scene.pool.generate("new", request(version)), version, version)
        while set(await client.adapters()) != set(names):
            await asyncio.sleep(0.05)
    scene.check(await begun, 1, 0)


async def test_a_sampler_that_missed_versions_goes_on_with_the_newest(scene: Scene) -> None:
    late = await scene.served(0)
    for version in (1, 2):
        await scene.publisher.announce(version)
        await scene.served(version)
    newest = await scene.served(2)
    async with SGLangClient(newest.base_url) as client:
        while late.adapter in await client.adapters():
            await asyncio.sleep(0.05)
    scene.pool.update([late])
    asking = asyncio.create_task(scene.pool.generate("late", request(5)))
    await asyncio.sleep(0)
    scene.pool.update([newest])
    scene.check(await asking, 5, 2)


async def test_a_server_that_died_comes_back_with_the_newest_adapter(scene: Scene) -> None:
    service = await scene.served(0)
    engine_of(int(service.base_url.rpartition(":")[2])).kill()
    await scene.publisher.announce(3)
    service = await scene.served(3)
    scene.check(await scene.pool.generate("again", request(6)), 6, 3)
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
