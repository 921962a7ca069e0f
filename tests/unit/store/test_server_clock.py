"""Leases and times under a server's clock that steps, and under a sampler's that is wrong."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.mongod_programs import FAKETIME, mongod_with_clock
from support.stored import claim, make_task

from agentrl.schema import InferenceService, Record, SamplerInfo
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

HOUR = 3600
LEASE_SECONDS = 1.2


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """The file that says how far the clock of `stepping` is off, in seconds."""
    path = tmp_path / "offset"
    path.write_text("+0")
    return path


@pytest.fixture
async def stepping(
    tmp_path: Path, clock: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TrajectoryStore]:
    """A store on a mongod whose wall clock can be set while its monotonic clock goes on."""
    if not FAKETIME.exists():
        pytest.skip("libfaketime is not installed (apt-get install faketime)")
    monkeypatch.setenv("MONGOD_BINARY", str(mongod_with_clock(tmp_path, clock)))
    with EmbeddedMongo(tmp_path / "data") as mongo:
        async with TrajectoryStore.connect(mongo.uri("run")) as store:
            await store.ensure_schema()
            yield store


async def step(store: TrajectoryStore, clock: Path, seconds: int) -> None:
    """Set the server's clock, and wait until it shows."""
    before = await store.database.handle.command("hello")
    clock.write_text(f"{seconds:+d}")
    async with asyncio.timeout(10):
        while True:
            now = await store.database.handle.command("hello")
            if abs((now["localTime"] - before["localTime"]).total_seconds()) > HOUR / 2:
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def holders(
    tmp_path: Path,
) -> AsyncIterator[tuple[EmbeddedMongo, TrajectoryStore, TrajectoryStore, Record, Record]]:
    """Yield a mongod, the stores of a holder and of an observer, and a live and a dead one's Record."""
    with EmbeddedMongo(tmp_path / "data") as mongo:
        async with (
            TrajectoryStore.connect(mongo.uri("run")) as store,
            TrajectoryStore.connect(mongo.uri("run")) as observer,
        ):
            await store.ensure_schema()
            await store.tasks.add([make_task(0)])
            live = await claim(store, "elsewhere:1:0-a", lease_seconds=LEASE_SECONDS)
            dead = await claim(store, "elsewhere:2:0-b", lease_seconds=LEASE_SECONDS)
            yield mongo, store, observer, live, dead


async def check_who_lost(store: TrajectoryStore, live: Record, dead: Record) -> None:
    kept, gone = await store.records.get(live.id), await store.records.get(dead.id)
    assert kept is not None
    assert [one.ended_by for one in kept.attempts] == [None]
    assert gone is not None
    assert [one.ended_by for one in gone.attempts] == ["expired"]


@pytest.mark.parametrize("is_fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_step_forward_takes_no_live_lease(
    stepping: TrajectoryStore, clock: Path, is_fresh: bool
) -> None:
    await stepping.tasks.add([make_task(0)])
    live = await claim(stepping, "elsewhere:1:0-a", lease_seconds=LEASE_SECONDS)
    dead = await claim(stepping, "elsewhere:2:0-b", lease_seconds=LEASE_SECONDS)
    if is_fresh:
        stepping.clock.distrust()
    await step(stepping, clock, HOUR)
    deadline = asyncio.get_running_loop().time() + 2 * LEASE_SECONDS
    num_expired = 0
    while asyncio.get_running_loop().time() < deadline:
        num_expired += (await stepping.groups.reap(3, lease_seconds=LEASE_SECONDS)).num_expired
        await asyncio.sleep(LEASE_SECONDS / 6)
        assert await stepping.records.renew([(live.id, live.fence)], LEASE_SECONDS) == set()
    assert num_expired == 1
    await check_who_lost(stepping, live, dead)


@pytest.mark.slow
async def test_a_step_back_does_not_block_the_slots_of_the_dead(
    stepping: TrajectoryStore, clock: Path
) -> None:
    await stepping.tasks.add([make_task(0)])
    live = await claim(stepping, "elsewhere:1:0-a", lease_seconds=LEASE_SECONDS)
    dead = await claim(stepping, "elsewhere:2:0-b", lease_seconds=LEASE_SECONDS)
    server = InferenceService(id="h:1", base_url="http://h", backend="embedded", model_path="m")
    await stepping.services.register(server)
    await step(stepping, clock, -HOUR)
    assert await stepping.services.all(alive_within=30) == []
    num_expired = 0
    async with asyncio.timeout(10 * LEASE_SECONDS):
        while not num_expired:
            await stepping.records.renew([(live.id, live.fence)], LEASE_SECONDS)
            num_expired = (await stepping.groups.reap(3, lease_seconds=LEASE_SECONDS)).num_expired
            await asyncio.sleep(LEASE_SECONDS / 6)
    again = await claim(stepping, lease_seconds=LEASE_SECONDS)
    assert again.id == dead.id


@pytest.mark.slow
async def test_a_turn_is_dated_by_the_servers_clock(stepping: TrajectoryStore, clock: Path) -> None:
    await step(stepping, clock, 2 * HOUR)
    now = await stepping.database.server_time()
    assert abs((stepping.clock.now() - now).total_seconds()) < 1


@pytest.mark.parametrize("began", ["before", "behind"])
async def test_a_server_that_stood_still_takes_no_live_lease(tmp_path: Path, began: str) -> None:
    async with holders(tmp_path) as (mongo, store, observer, live, dead):
        if began == "before":
            await observer.samplers.heartbeat(SamplerInfo(id="s", host="h", pid=3))
        os.kill(mongo.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5 * LEASE_SECONDS)
        os.kill(mongo.pid, signal.SIGCONT)
        if began == "behind":
            await observer.samplers.heartbeat(SamplerInfo(id="s", host="h", pid=3))
        num_expired = 0
        for _ in range(12):
            # Whose turn it is when the server goes on is chance: here the reaper's.
            reaped = await observer.groups.reap(3, lease_seconds=LEASE_SECONDS)
            num_expired += reaped.num_expired
            await observer.samplers.heartbeat(SamplerInfo(id="s", host="h", pid=3))
            renewed = await store.records.renew([(live.id, live.fence)], LEASE_SECONDS)
            assert renewed == set()
            await asyncio.sleep(LEASE_SECONDS / 6)
        assert num_expired == 1
        await check_who_lost(store, live, dead)


async def test_a_server_that_was_away_takes_no_live_lease(tmp_path: Path) -> None:
    async with holders(tmp_path) as (mongo, store, observer, live, dead):
        await observer.groups.reap(3, lease_seconds=LEASE_SECONDS)
        os.kill(mongo.pid, signal.SIGKILL)
        mongo.stop()
        mongo.start()
        ended = asyncio.get_running_loop().time() + 2 * LEASE_SECONDS
        await asyncio.sleep(LEASE_SECONDS)
        num_expired = (await observer.groups.reap(3, lease_seconds=LEASE_SECONDS)).num_expired
        assert num_expired == 0
        while asyncio.get_running_loop().time() < ended:
            renewed = await store.records.renew([(live.id, live.fence)], LEASE_SECONDS)
            assert renewed == set()
            await asyncio.sleep(LEASE_SECONDS / 6)
            reaped = await observer.groups.reap(3, lease_seconds=LEASE_SECONDS)
            num_expired += reaped.num_expired
        assert num_expired == 1
        await check_who_lost(store, live, dead)
