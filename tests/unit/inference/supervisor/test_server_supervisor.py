import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
from support.engines import make_model, request

from agentrl.config.sections import InferenceSection, ModelSection, PublishSection
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.supervisor.server_heartbeat import PAUSED_SECONDS
from agentrl.inference.supervisor.server_supervisor import ServerPlan, ServerSupervisor
from agentrl.plugins.engine.generation.engine_loop import MAX_FAILED_STEPS
from agentrl.runtime.ports import free_port
from agentrl.schema import InferenceService
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux only")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=1)


@asynccontextmanager
async def supervised(
    store: TrajectoryStore, model: Path, folder: Path, port: int, **inference: object
) -> AsyncIterator[ServerSupervisor]:
    """A supervisor at work, with a server on the port or one after it."""
    supervisor = ServerSupervisor(
        store,
        ServerPlan(url=None, model_path=model, log_prefix=f"{folder}/engine_", seed=0),
        model=ModelSection(),
        inference=InferenceSection(inference_port=port, inference_threads=1, **inference),
        publish=PublishSection(),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop, max_restarts=2, start_seconds=50))
    try:
        yield supervisor
    finally:
        stop.set()
        await running


async def up(store: TrajectoryStore) -> InferenceService:
    """Wait (bounded by the test's own timeout) until the store's one server is up."""
    while True:
        found = [service for service in await store.services.all() if service.status == "up"]
        if found:
            return found[0]
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_runs_that_start_together_get_servers_of_their_own(
    mongod: EmbeddedMongo, model: Path, tmp_path: Path
) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        stores = []
        for name in ("race_one", "race_two"):
            store = await stack.enter_async_context(TrajectoryStore.connect(mongod.uri(name)))
            stack.push_async_callback(store.drop_database)
            await store.ensure_schema()
            stores.append(store)
        for number, store in enumerate(stores):
            await stack.enter_async_context(supervised(store, model, tmp_path / str(number), port))
        first, second = await asyncio.gather(*map(up, stores))
        assert first.base_url != second.base_url
        for service, store in ((first, stores[0]), (second, stores[1])):
            assert [known.id for known in await store.services.all()] == [service.id]


@pytest.mark.slow
async def test_stranger_on_the_port_is_not_taken_for_the_own_server(
    store: TrajectoryStore, model: Path, tmp_path: Path
) -> None:
    port = free_port()
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with supervised(store, model, tmp_path, port):
        # It comes when the port is chosen already and the engine does not listen yet.
        while not (tmp_path / f"engine_{port}.log").exists():
            await asyncio.sleep(0.01)
        stranger = await asyncio.start_server(answer, "127.0.0.1", port)
        async with stranger:
            service = await up(store)
            assert service.base_url == f"http://127.0.0.1:{port + 1}"
            assert requests == []
            async with SGLangClient(service.base_url) as client:
                assert (await client.model_info()).model_path == str(model)


async def test_hung_server_is_taken_out_and_replaced(
    store: TrajectoryStore, model: Path, tmp_path: Path
) -> None:
    port = free_port()
    async with supervised(store, model, tmp_path, port, server_hang_seconds=1.5):
        before = await up(store)
        assert before.takes_priorities
        listener(port).suspend()
        while (await store.services.all())[0].status == "up":
            await asyncio.sleep(0.05)
        while (after := await up(store)).started_at == before.started_at:
            await asyncio.sleep(0.05)
        async with SGLangClient(after.base_url) as client:
            assert (await client.generate(request(1, max_new_tokens=2))).finish_reason == "length"


@pytest.mark.slow
async def test_a_server_that_answers_but_cannot_compute_is_replaced(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", seed=1)
    num_tokens = 200_000  # a cache of 100 MB
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 2 * num_tokens
    (model / "config.json").write_text(json.dumps(config))
    port = free_port()
    async with supervised(store, model, tmp_path, port, server_hang_seconds=1.5):
        before = await up(store)
        engine = listener(port)
        limit = engine.memory_info().vms + (32 << 20)
        engine.rlimit(psutil.RLIMIT_AS, (limit, limit))
        body = {"input_ids": [5] * num_tokens, "sampling_params": {"max_new_tokens": 2}}
        async with httpx.AsyncClient(base_url=before.base_url, timeout=30) as client:
            for _ in range(MAX_FAILED_STEPS):
                answer = await client.post("/generate", json=body)
                assert answer.status_code == 500
                assert "memory is short" in answer.json()["message"]
        while (await up(store)).started_at == before.started_at:
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(
    mongod: EmbeddedMongo, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TrajectoryStore]:
    """The store of one supervised server, which the tests below share."""
    folder = tmp_path_factory.mktemp("serving")
    async with TrajectoryStore.connect(mongod.uri("serving")) as store:
        await store.ensure_schema()
        async with supervised(store, model, folder, free_port()):
            yield store
        await store.drop_database()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_paused_without_a_publication_is_resumed_and_it_is_said(
    serving: TrajectoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    service = await up(serving)
    async with SGLangClient(service.base_url) as client:
        await client.pause("retract")
        assert await client.is_paused()
        result = await client.generate(request(1, max_new_tokens=2))  # waits for the end of it
    assert result.finish_reason == "length"
    now = await up(serving)
    assert now.started_at == service.started_at
    assert "without a publication; resumed" in (now.error or "")
    assert "without a publication; resumed" in caplog.text


@pytest.mark.asyncio(loop_scope="module")
async def test_the_server_of_a_publisher_at_work_stays_paused(serving: TrajectoryStore) -> None:
    service = await up(serving)
    async with SGLangClient(service.base_url) as client:
        await serving.services.set_status(service.id, status="updating")
        await client.pause("retract")
        beats: set[object] = set()
        while len(beats) < 2 + PAUSED_SECONDS:
            beats.add((await serving.services.all())[0].heartbeat_at)
            await asyncio.sleep(0.05)
        assert await client.is_paused()
        await client.continue_()
        await serving.services.set_status(service.id, status="up")


@pytest.mark.asyncio(loop_scope="module")
async def test_killed_server_comes_back_on_its_port(serving: TrajectoryStore) -> None:
    before = await up(serving)
    port = int(before.base_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)):
        pass
    listener(port).kill()
    while (after := await up(serving)).started_at == before.started_at:
        await asyncio.sleep(0.05)
    assert after.base_url == before.base_url


def listener(port: int) -> psutil.Process:
    """Return the child of this process that listens on the port."""
    for child in psutil.Process().children(recursive=True):
        if any(c.laddr.port == port for c in child.net_connections("tcp") if c.status == "LISTEN"):
            return child
    raise AssertionError(f"nobody listens on {port}")
