"""Servers of SGLang's older versions, through a publication and generations; and who gets which key.

The stand-in has the routes that a version had (compared in the wheels) and nothing of its insides.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.responses import JSONResponse, Response
from support.control_server import ControlServer, serve
from support.stub_server import generation

from agentrl.config.sections import InferenceSection, ModelSection, PublishSection
from agentrl.inference import SGLangClient
from agentrl.inference.client.pool import ServerPool
from agentrl.inference.supervisor.server_supervisor import ServerPlan, ServerSupervisor
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.inference.weight_sync.server_operations import close_broadcast, open_broadcast
from agentrl.inference.wire import GenerateRequest
from agentrl.schema import Run, SamplingParams
from agentrl.store import TrajectoryStore

_SESSION = {"begin_weight_update", "end_weight_update"}
MISSING: dict[str, set[str]] = {
    "0.5.9": _SESSION,
    "0.5.12.post1": _SESSION,
    "0.5.19": _SESSION,
    "0.5.23": set(),
    "0.5.9+bare": _SESSION | {"v1/loads"},
}
"""Version -> the routes that it lacks; the last one hides behind something that hides more."""
WITH_SPANS = {"0.5.19", "0.5.23"}
DATA, ADMIN = "Bearer data", "Bearer admin"
KEYED = InferenceSection(
    inference_api_key=SecretStr("data"), inference_admin_key=SecretStr("admin")
)
REQUEST = GenerateRequest(input_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=10))


@asynccontextmanager
async def server_of(version: str) -> AsyncIterator[ControlServer]:
    """A server of one version, which remembers what it was told to load."""
    async with serve(version) as control:
        label = "default"

        def load(body: dict[str, str]) -> Response:
            nonlocal label
            label = body["weight_version"]
            return JSONResponse({"success": True, "message": "ok"})

        def generate(_: dict[str, object]) -> Response:
            body = generation([7, 8], version=label)
            if version not in WITH_SPANS:
                del body["meta_info"]["weight_versions"]
            return JSONResponse(body)

        for route in MISSING[version]:
            control.answers[route] = lambda _: JSONResponse({"detail": "Not Found"}, 404)
        control.answers["update_weights_from_disk"] = load
        control.answers["generate"] = generate
        control.answers["model_info"] = lambda _: JSONResponse({"weight_version": label})
        yield control


@asynccontextmanager
async def supervised(store: TrajectoryStore, url: str) -> AsyncIterator[None]:
    """A supervisor at work beside a server that somebody else runs."""
    plan = ServerPlan(url=url, model_path=Path("m"), log_prefix="", seed=0)
    supervisor = ServerSupervisor(
        store, plan, model=ModelSection(), inference=KEYED, publish=PublishSection()
    )
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop, max_restarts=0, start_seconds=20))
    try:
        async with asyncio.timeout(20):
            while not [one for one in await store.services.all() if one.status == "up"]:
                await asyncio.sleep(0.02)
        yield
    finally:
        stop.set()
        await running


@pytest.mark.parametrize("version", MISSING)
async def test_every_version_takes_new_weights_and_gives_tokens_with_their_version(
    store: TrajectoryStore, tmp_path: Path, version: str
) -> None:
    await store.runs.create(Run(name=store.database_name))
    publisher = PolicyPublisher(store, tmp_path, publish=PublishSection(), inference=KEYED)
    publisher.directory(1).mkdir(parents=True)
    (publisher.directory(1) / "model.safetensors").write_bytes(b"weights")
    async with server_of(version) as control, supervised(store, control.base_url):
        report = await publisher.announce(1)
        assert report.failed == {}
        await publisher.settle()
        (service,) = await store.services.all()
        assert (service.status, service.policy_version) == ("up", 1)
        async with ServerPool(api_key=SecretStr("data"), gateway=None) as pool:
            pool.update([service])
            result = await pool.generate("record", REQUEST)
    assert [(span.version, span.start, span.end) for span in result.version_spans] == [(1, 0, 2)]
    mode = next(body["mode"] for name, body in control.calls if name == "pause_generation")
    assert mode == ("retract" if version == "0.5.23" else "abort")
    policy = await store.policies.latest()
    assert policy is not None
    assert policy.checksum == hashlib.sha256(b"weights").hexdigest()


@pytest.mark.parametrize("version", MISSING)
async def test_every_version_is_opened_for_a_broadcast_and_closed_again(version: str) -> None:
    async with server_of(version) as control, SGLangClient(control.base_url) as client:
        await open_broadcast(client, "retract")
        await close_broadcast(client, "group")
    assert control.names()[-1] == "continue_generation"


async def test_a_server_that_drops_connections_before_it_is_up_is_asked_again(
    store: TrajectoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with server_of("0.5.23") as control:
        answer = control.answers["model_info"]
        num_dropped = 0

        def drop_two(body: dict[str, Any]) -> Awaitable[Response] | Response:
            nonlocal num_dropped
            if num_dropped == 2:
                return answer(body)
            num_dropped += 1
            return Response(headers={"Content-Length": "9"})  # the connection ends before its body

        control.answers["model_info"] = drop_two
        async with supervised(store, control.base_url):
            assert num_dropped == 2
    assert caplog.text.count("is not up yet") == 2


async def test_each_key_goes_to_its_routes_and_a_gateway_gets_the_one_for_generation(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    publisher = PolicyPublisher(store, tmp_path, publish=PublishSection(), inference=KEYED)
    publisher.directory(1).mkdir(parents=True)
    async with (
        server_of("0.5.23") as gateway,
        server_of("0.5.23") as control,
        supervised(store, control.base_url),
    ):
        await publisher.announce(1)
        await publisher.settle()
        async with ServerPool(api_key=SecretStr("data"), gateway=gateway.base_url) as pool:
            pool.update(await store.services.all())
            await pool.generate("record", REQUEST)
        async with asyncio.timeout(10):
            while "v1/loads" not in control.keys:
                await asyncio.sleep(0.02)
    assert gateway.keys == {"generate": {DATA}}
    for probe in ("health", "ready"):
        control.keys.pop(probe, None)
    asked = {name for name, keys in control.keys.items() if keys == {DATA}}
    told = {name for name, keys in control.keys.items() if keys == {ADMIN}}
    assert {"model_info", "server_info", "v1/loads"} <= asked
    assert {"pause_generation", "update_weights_from_disk", "continue_generation"} <= told
    assert asked | told == set(control.keys)
