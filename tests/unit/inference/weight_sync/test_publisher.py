"""Updates of servers whose answers each test decides."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response
from support.control_server import ControlServer, refuse, serve

from agentrl.config.sections import InferenceSection, PublishSection
from agentrl.errors import InferenceError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.weight_sync import PolicyPublisher, update_server
from agentrl.inference.weight_sync.server_operations import release_of
from agentrl.schema import InferenceService, Run
from agentrl.store import TrajectoryStore


async def update(control: ControlServer, **options: Any) -> None:
    settings: dict[str, Any] = {"mode": "retract", "timeout_seconds": 5.0, **options}
    async with SGLangClient(control.base_url) as client:
        await update_server(client, Path("/weights/000007"), 7, **settings)


async def test_a_server_is_paused_updated_and_continued() -> None:
    async with serve() as control:
        await update(control)
    assert control.names() == [
        "pause_generation",
        "update_weights_from_disk",
        "continue_generation",
    ]
    assert control.calls[0][1]["mode"] == "retract"
    body = control.calls[1][1]
    assert (body["model_path"], body["weight_version"]) == ("/weights/000007", "7")
    assert body["flush_cache"] is True


async def test_in_place_keeps_the_cache() -> None:
    async with serve() as control:
        await update(control, mode="in_place")
    assert control.calls[1][1]["flush_cache"] is False


async def test_old_servers_are_paused_with_abort_instead_of_retract() -> None:
    async with serve("0.5.15.post1") as control:
        await update(control)
    assert control.calls[0][1]["mode"] == "abort"


async def test_a_server_that_refuses_the_weights_is_continued() -> None:
    async with serve() as control:
        control.answers["update_weights_from_disk"] = refuse(400, "no such directory")
        with pytest.raises(InferenceError, match="no such directory"):
            await update(control)
    assert control.names()[-1] == "continue_generation"


async def test_a_failed_pause_is_continued_too() -> None:
    async with serve() as control:
        control.answers["pause_generation"] = refuse(500, "lost")
        with pytest.raises(InferenceError, match="lost"):
            await update(control)
    assert control.names() == ["pause_generation", "continue_generation"]


async def test_updated_but_not_flushed_is_repaired_without_loading_again() -> None:
    async with serve() as control:
        control.answers["update_weights_from_disk"] = refuse(
            400, "Weights were updated, but the cache was not flushed"
        )
        await update(control)
    assert control.names() == [
        "pause_generation",
        "update_weights_from_disk",
        "flush_cache",
        "update_weight_version",
        "continue_generation",
    ]
    assert control.calls[3][1]["new_version"] == "7"


async def test_a_slow_server_is_given_up_and_continued() -> None:
    async with serve() as control:
        release = asyncio.Event()

        async def hang(_: dict[str, Any]) -> Response:
            await release.wait()
            return JSONResponse({"success": True, "message": "late"})

        control.answers["update_weights_from_disk"] = hang
        with pytest.raises(InferenceError, match=r"longer than 0\.2 s"):
            await update(control, timeout_seconds=0.2)
        assert control.names()[-1] == "continue_generation"
        release.set()


async def test_server_that_answers_nothing_at_all_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.inference.weight_sync.server_operations._CONTINUE_SECONDS", 0.2)
    async with serve() as control:
        release = asyncio.Event()

        async def hang(_: dict[str, Any]) -> Response:
            await release.wait()
            return JSONResponse({"success": True, "message": "late"})

        control.answers["pause_generation"] = control.answers["continue_generation"] = hang
        async with asyncio.timeout(30):
            with pytest.raises(InferenceError, match=r"longer than 0\.2 s"):
                await update(control, timeout_seconds=0.2)
        release.set()


async def test_continuing_is_tried_again() -> None:
    async with serve() as control:
        refusals = iter([True, False])

        def once(_: dict[str, Any]) -> Response:
            return JSONResponse({"message": "busy"}, status_code=503 if next(refusals) else 200)

        control.answers["continue_generation"] = once
        await update(control)
    assert control.names().count("continue_generation") == 2


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.5.12.post1", (0, 5, 12)), ("v0.6.0rc1", (0, 6, 0)), ("main", None)],
)
def test_release_numbers(text: str, numbers: tuple[int, int, int] | None) -> None:
    assert release_of(text) == numbers


def publisher_of(store: TrajectoryStore, root: Path, **publish: Any) -> PolicyPublisher:
    publisher = PolicyPublisher(
        store, root, publish=PublishSection(**publish), inference=InferenceSection()
    )
    for version in range(4):
        publisher.directory(version).mkdir(parents=True)
        (publisher.directory(version) / "model.safetensors").write_bytes(b"weights %d" % version)
    return publisher


async def register(store: TrajectoryStore, name: str, base_url: str, version: int = 0) -> None:
    await store.services.register(
        InferenceService(
            id=name,
            base_url=base_url,
            backend="embedded",
            model_path="m",
            policy_version=version,
        )
    )


async def test_good_servers_are_updated_and_bad_ones_taken_out(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    publisher = publisher_of(store, tmp_path)
    async with serve() as good, serve() as bad:
        bad.answers["update_weights_from_disk"] = refuse(400, "corrupt file")
        await register(store, "good", good.base_url)
        await register(store, "bad", bad.base_url)
        await register(store, "gone", "http://127.0.0.1:9")
        report = await publisher.announce(3)
    assert report.updated == ("good",)
    assert report.failed.keys() == {"bad", "gone"}
    services = {service.id: service for service in await store.services.all()}
    assert (services["good"].status, services["good"].policy_version) == ("up", 3)
    assert (services["bad"].status, services["bad"].policy_version) == ("down", 0)
    assert "corrupt file" in (services["bad"].error or "")
    assert report.paused_seconds.keys() == {"good"}
    assert report.paused_seconds["good"] < 5
    await publisher.settle()
    policy = await store.policies.latest()
    assert policy is not None
    assert (policy.version, policy.num_bytes) == (3, len(b"weights 3"))
    assert policy.checksum == hashlib.sha256(b"weights 3").hexdigest()


async def test_publishing_without_servers_is_no_error(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    report = await publisher_of(store, tmp_path).announce(1)
    assert (report.updated, report.failed) == ((), {})


async def test_a_server_whose_updater_died_takes_the_next_version(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    publisher = publisher_of(store, tmp_path)
    async with serve() as control:
        await register(store, "left", control.base_url)
        await store.services.set_status("left", status="updating")
        assert (await publisher.announce(2)).updated == ("left",)
        assert "continue_generation" in control.names()
    (service,) = await store.services.all()
    assert (service.status, service.policy_version) == ("up", 2)


async def test_version_that_a_starting_server_reads_is_kept(
    store: TrajectoryStore, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    publisher = publisher_of(store, tmp_path, keep_policies=1)
    await publisher.announce(1)
    held = await store.policies.hold_latest(60)
    assert held is not None
    for version in (2, 3):
        await publisher.announce(version)
    await publisher.settle()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003"]


async def test_versions_in_use_are_kept_on_disk(store: TrajectoryStore, tmp_path: Path) -> None:
    await store.runs.create(Run(name=store.database_name))
    publisher = publisher_of(store, tmp_path, keep_policies=1)
    async with serve() as control:

        async def another_joins(_: dict[str, Any]) -> Response:
            await register(store, "late", control.base_url, version=1)
            return JSONResponse({"success": True, "message": "ok"})

        control.answers["update_weights_from_disk"] = another_joins
        await register(store, "early", control.base_url)
        await publisher.announce(3)
        await publisher.settle()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003"]
