"""Servers that give their memory up and wake on new weights; each test decides their answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response
from support.control_server import ControlServer, refuse, serve

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync import PolicyPublisher
from agentrl.inference.weight_sync.server_operations import put_to_sleep, wake
from agentrl.schema import InferenceService, Policy, Run
from agentrl.store import TrajectoryStore

POLICY = Policy(version=7, path="/weights/000007", num_bytes=1)


async def sleep(control: ControlServer, timeout_seconds: float = 5.0) -> None:
    async with SGLangClient(control.base_url) as client:
        await put_to_sleep(client, mode="retract", timeout_seconds=timeout_seconds)


async def woken(control: ControlServer, timeout_seconds: float = 5.0) -> float:
    async with SGLangClient(control.base_url) as client:
        return await wake(client, POLICY, timeout_seconds=timeout_seconds)


async def test_nothing_is_released_before_the_cache_is_flushed() -> None:
    async with serve() as control:
        flushes = iter([400, 400, 200])

        def busy_at_first(_: dict[str, Any]) -> Response:
            return JSONResponse("flushed", status_code=next(flushes))

        control.answers["flush_cache"] = busy_at_first
        await sleep(control)
    assert control.names() == [
        "pause_generation",
        *("flush_cache", "flush_cache", "flush_cache"),
        "release_memory_occupation",
    ]
    assert control.calls[0][1]["mode"] == "retract"
    assert control.calls[-1][1]["tags"] == ["kv_cache", "weights"]


async def test_old_servers_cut_generations_before_they_sleep() -> None:
    async with serve("0.5.15.post1") as control:
        await sleep(control)
    assert control.calls[0][1]["mode"] == "abort"


async def test_a_server_that_could_not_give_memory_up_is_left_as_it_is() -> None:
    async with serve() as control:
        control.info["enable_memory_saver"] = False
        with pytest.raises(InferenceError, match="start it with --colocated"):
            await sleep(control)
    assert control.names() == []


async def test_a_server_that_stays_busy_holds_nobody_up() -> None:
    async with serve() as control:
        control.answers["flush_cache"] = refuse(400, "busy")
        with pytest.raises(InferenceError, match=r"longer than 0\.3 s to release its memory"):
            await sleep(control, timeout_seconds=0.3)
    assert "release_memory_occupation" not in control.names()


async def test_a_server_wakes_on_new_weights() -> None:
    async with serve() as control:
        assert await woken(control) < 5
    assert control.calls[0][1]["tags"] == ["weights"]
    assert control.calls[1][1]["weight_version"] == "7"
    assert control.calls[2][1]["tags"] == ["kv_cache"]
    assert control.names() == [
        "resume_memory_occupation",
        "update_weights_from_disk",
        "resume_memory_occupation",
        "continue_generation",
    ]


async def test_a_server_without_weights_does_not_go_on() -> None:
    async with serve() as control:
        control.answers["update_weights_from_disk"] = refuse(400, "no such directory")
        with pytest.raises(InferenceError, match="no such directory"):
            await woken(control)
    assert control.names()[-1] == "update_weights_from_disk"


async def register(store: TrajectoryStore, name: str, control: ControlServer) -> None:
    await store.services.register(
        InferenceService(id=name, base_url=control.base_url, backend="embedded", model_path="m")
    )


async def test_all_servers_sleep_until_the_next_version(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    publisher = PolicyPublisher(
        store, tmp_path, publish=PublishSection(), inference=InferenceSection()
    )
    publisher.directory(1).mkdir(parents=True)
    (publisher.directory(1) / "model.safetensors").write_bytes(b"weights")
    async with serve() as good, serve() as bad, serve() as taken:
        bad.answers["release_memory_occupation"] = refuse(400, "still busy")
        for name, control in {"good": good, "bad": bad, "taken": taken}.items():
            await register(store, name, control)
        await publisher.put_to_sleep()
        services = {service.id: service for service in await store.services.all()}
        assert {name: s.status for name, s in services.items()} == {
            "good": "asleep",
            "taken": "asleep",
            "bad": "down",
        }
        assert "still busy" in (services["bad"].error or "")
        # A supervisor was first with one of them; nobody wakes it twice.
        assert await store.services.claim_sleeping("taken")
        assert not await store.services.claim_sleeping("taken")
        await store.services.set_status("taken", status="asleep")
        claims = await asyncio.gather(*(store.services.claim_sleeping("taken") for _ in range(3)))
        assert sorted(claims) == [False, False, True]
        await store.services.set_status("taken", status="down")
        report = await publisher.announce(1)
    assert (report.updated, report.failed) == (("good",), {})
    assert good.names()[-1] == "continue_generation"
    assert "resume_memory_occupation" not in taken.names()
    services = {service.id: service for service in await store.services.all()}
    assert (services["good"].status, services["good"].policy_version) == ("up", 1)
    await publisher.settle()
