"""Adapters from publisher to real engines: nothing is paused, cut or taken away in use."""

import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.adapters import make_adapter
from support.engines import Oracle, make_model, prompt, request

from agentrl.config.sections import InferenceSection, ModelSection, PublishSection
from agentrl.errors import InferenceError
from agentrl.inference import ServerPool
from agentrl.inference.client import SGLangClient
from agentrl.inference.wire import GenerateResult, adapter_version
from agentrl.models.lora import merge_adapter
from agentrl.processes.ports import free_port
from agentrl.schema import InferenceService, Run
from agentrl.server.keeper import ServerKeeper, ServerPlan
from agentrl.store import TrajectoryStore
from agentrl.weight_sync import AdapterNames, PolicyPublisher
from agentrl.weight_sync.adapters import is_of_same_run


async def until(store: TrajectoryStore, version: int) -> InferenceService:
    """Wait (bounded by the test's own timeout) until the one server serves a version."""
    while True:
        for service in await store.services():
            if service.status == "up" and service.policy_version == version and service.adapter:
                return service
        await asyncio.sleep(0.05)


async def until_loaded(client: SGLangClient, names: set[str]) -> None:
    """Wait (bounded by the test's own timeout) until a server holds these adapters only."""
    while set(await client.adapters()) != names:
        await asyncio.sleep(0.05)


async def test_generations_finish_on_the_adapter_that_they_began_with(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", seed=1)
    await store.create_run(Run(name=store.database_name))
    publisher = PolicyPublisher(
        store,
        tmp_path / "policy",
        publish=PublishSection(),
        inference=InferenceSection(),
        adapters=AdapterNames("run"),
    )
    oracle, merged = Oracle(), {}
    for version in range(4):
        directory = make_adapter(model, publisher.directory(version), seed=version)
        merged[version] = merge_adapter(directory, model, tmp_path / f"merged{version}")

    def check(result: GenerateResult, seed: int, version: int) -> None:
        (span,) = result.version_spans
        assert (span.version, span.start, span.end) == (version, 0, len(result.output_ids))
        expected = oracle.logprobs(merged[version], prompt(seed), result.output_ids)
        np.testing.assert_allclose(result.output_logprobs, expected, atol=1e-4)

    keeper = ServerKeeper(
        store,
        ServerPlan(url=None, model_path=model, log_prefix=f"{tmp_path}/engine_", seed=0),
        model=ModelSection(lora_rank=4),
        inference=InferenceSection(inference_port=free_port(), inference_threads=1),
        publish=PublishSection(),
    )
    stop = asyncio.Event()
    await publisher.announce(0)
    running = asyncio.create_task(keeper.run(stop, max_restarts=2, start_seconds=50))
    try:
        service = await until(store, 0)
        async with ServerPool() as pool, SGLangClient(service.base_url) as client:
            pool.update([service])
            slow = request(1, max_new_tokens=3000, stop_token_ids=())
            begun = asyncio.create_task(pool.generate("slow", slow))
            while not (await client.loads()).num_running:
                await asyncio.sleep(0.01)
            names = {}
            for version in (1, 2):
                report = await publisher.announce(version)
                assert list(report.paused_seconds.values()) == [0.0]
                service = await until(store, version)
                names[version] = service.adapter
                pool.update([service])
                check(await pool.generate("new", request(version)), version, version)
                # The keeper sees every version, as it would between two steps.
                await until_kept(keeper, service.adapter)
            assert not begun.done(), "or nothing was in flight when the versions came"
            await until_loaded(client, {names[1], names[2]})
            begun.cancel()
            # A sampler that has not heard of the last two versions is told to ask again.
            pool.update([service.model_copy(update={"adapter": "run-abcdef-v0"})])
            asking = asyncio.create_task(pool.generate("late", request(5)))
            await asyncio.sleep(0)
            pool.update([service])
            check(await asking, 5, 2)

            port = int(service.base_url.rpartition(":")[2])
            engine_of(port).kill()
            await publisher.announce(3)
            service = await until(store, 3)
            pool.update([service])
            check(await pool.generate("again", request(6)), 6, 3)
            await until_loaded(client, {service.adapter})
    finally:
        stop.set()
        await running
        await publisher.settle()


async def until_kept(keeper: ServerKeeper, adapter: str | None) -> None:
    while keeper._adapter != adapter:
        await asyncio.sleep(0.05)


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
