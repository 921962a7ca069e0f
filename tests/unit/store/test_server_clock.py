"""Leases under a server that was away, and times under a clock of a sampler that is wrong."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from support.stored import claim, make_task

from agentrl.schema import Record, SamplerInfo, utc_now
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

LEASE_SECONDS = 1.2


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


async def test_times_are_those_of_the_servers_clock(store: TrajectoryStore) -> None:
    assert abs(store.clock.now() - await store.database.server_time()) < timedelta(seconds=1)
    store.clock.note(utc_now() + timedelta(hours=2))
    assert store.clock.now() > utc_now() + timedelta(hours=1)


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
