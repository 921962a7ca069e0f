"""The processes that work on a run now, derived from leases and heartbeats in server time.

An ended process of this machine is recognized immediately, one of another machine when its lease has
expired or its heartbeat is old.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Literal

from agentrl.runtime.processes.process_identity import is_dead
from agentrl.schema import RunState, RunStatus
from agentrl.schema.base import Value
from agentrl.schema.run import ENDED_RUNS
from agentrl.store.database import RunDatabase
from agentrl.store.documents.codec import Document

ALIVE_SECONDS = 20.0
"""A process that reported within this time counts as alive."""
START_SECONDS = 60.0
"""How long `agentrl run` may take until one of its processes has registered."""


class LiveProcess(Value):
    """One process that works on a run."""

    kind: Literal["trainer", "sampler", "inference server", "holder"]
    """`holder` means that it holds a record's lease."""
    id: str
    since: datetime | None = None
    consumer: str = ""
    """Name of the trainer."""
    lease_until: datetime | None = None
    release: str = ""
    """Version of AgentRL; empty for holders, and for releases that do not say."""

    def __str__(self) -> str:
        if self.kind == "trainer":
            return (
                f"{self.id} trains it as {self.consumer!r}, with a lease until "
                f"{self.lease_until:%H:%M:%S} UTC"
            )
        if self.kind == "holder":
            return f"{self.id} holds a lease on one of its records"
        return f"{self.kind} {self.id} has been active since {self.since:%Y-%m-%d %H:%M:%S} UTC"


async def live_processes(database: RunDatabase) -> list[LiveProcess]:
    """Return the run's processes: `workers`, and then the other holders of records."""
    now = await database.server_time()
    leased = {"status": {"$in": ["running", "finished"]}, "lease.expires_at": {"$gt": now}}
    owners = await database.records.distinct("lease.owner", leased)
    holders = [LiveProcess(kind="holder", id=one) for one in owners if one and not is_dead(one)]
    return await workers(database, now) + holders


async def workers(database: RunDatabase, now: datetime) -> list[LiveProcess]:
    """Return the processes that registered: trainers, then samplers and servers."""
    # A server out of service is still supervised; one that was ended has the error `stopped`.
    servers = database.services.find({**_reported(now), "error": {"$ne": "stopped"}})
    return [
        *await _trainers(database, now),
        *await _samplers(database, now),
        *[_registered("inference server", one) async for one in servers],
    ]


def mixed_releases(processes: Sequence[LiveProcess]) -> str:
    """Return a warning that names workers of different releases; "" if all have one release."""
    named: dict[str, list[str]] = {}
    for one in processes:
        named.setdefault(one.release, []).append(f"{one.kind} {one.id}")
    if len(named) < 2:
        return ""
    releases = (f"{name or 'an earlier one'}: {', '.join(ids)}" for name, ids in named.items())
    return (
        f"processes of different releases of AgentRL work on this run ({'; '.join(releases)}); "
        "finish the upgrade"
    )


async def state_of(database: RunDatabase, run: Document) -> RunState:
    """Return the run's status, or `interrupted` if no process is left to continue it.

    Servers alone do not continue a run. A run that holds only questions or demonstrations was never
    started and is therefore not interrupted.
    """
    status: RunStatus = run["status"]
    phase = run.get("phase")
    if status in ENDED_RUNS or (status == "created" and phase is None):
        return status
    now = await database.server_time()
    if phase == "starting" and now - run["phase_at"] < timedelta(seconds=START_SECONDS):
        return status
    alive = await _trainers(database, now) or await _samplers(database, now)
    return status if alive else "interrupted"


async def _trainers(database: RunDatabase, now: datetime) -> list[LiveProcess]:
    run = await database.runs.find_one({}, {"trainer_leases": 1}) or {}
    return [
        LiveProcess(
            kind="trainer",
            id=lease["owner"],
            since=lease.get("since"),
            consumer=consumer,
            lease_until=lease["expires_at"],
            release=lease.get("release", ""),
        )
        for consumer, lease in run.get("trainer_leases", {}).items()
        if lease["expires_at"] > now and not is_dead(lease["owner"])
    ]


async def _samplers(database: RunDatabase, now: datetime) -> list[LiveProcess]:
    found = database.samplers.find({**_reported(now), "status": {"$ne": "stopped"}})
    return [_registered("sampler", one) async for one in found if not is_dead(one["_id"])]


def _registered(kind: Literal["sampler", "inference server"], one: Document) -> LiveProcess:
    return LiveProcess(
        kind=kind, id=one["_id"], since=one["started_at"], release=one.get("release", "")
    )


def _reported(now: datetime) -> Document:
    return {"heartbeat_at": {"$gt": now - timedelta(seconds=ALIVE_SECONDS)}}
