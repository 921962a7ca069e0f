"""Measures a fleet's cost apart from its turns: CPU time of loops that grow with its processes.

    python benchmarks/fleet_cost.py

The store's own operations run on a real mongod, and the client's own control calls on a real HTTP
server. The figures are CPU milliseconds of mongod and of the caller, per operation:

- `service_list`: a sampler reads the servers every second; by the number of servers
- `server_beat`: a server's heartbeat and its read of the latest policy, every second
- `sampler_beat`: a sampler's report, every two seconds
- `renewal`: the renewal of a lease, three times per lease period, in one request per sampler
- `control_call`: one call of the trainer to a server
- `prepare`: the time per record that rank 0 takes to build a step, by the kind of record

`scale_sim.py` computes loads from them.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from harness.played import MODEL, open_store
from harness.results import parser, report
from harness.scripted_engine import serve_script
from scale_model import WORKLOADS
from scale_model import Workload as Records
from tree_workloads import Workload, make_groups

from agentrl.data import build_step
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.renderers.renderer import Renderer
from agentrl.rollout.worker.admission_limits import SERVER_SILENCE_SECONDS
from agentrl.schema import InferenceService, MCPTask, Policy, SamplerInfo, ServerLoad
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

SERVERS = (8, 256, 2048)
LEASES = 256
GENERATIONS = 8
_LEASE_SECONDS = 600.0


class Meter:
    """CPU time of mongod and of this thread."""

    def __init__(self, mongo: EmbeddedMongo) -> None:
        self._mongod = psutil.Process(mongo.pid)

    async def of(self, number: int, work: Callable[[], Awaitable[Any]]) -> dict[str, float]:
        """Run `work`, which does `number` operations; return the milliseconds per operation."""
        before = self._mongod.cpu_times()
        cpu, started = time.thread_time(), time.monotonic()
        await work()
        seconds, cpu = time.monotonic() - started, time.thread_time() - cpu
        after = self._mongod.cpu_times()
        mongod = after.user + after.system - before.user - before.system
        return {
            "mongod_ms": round(1000 * mongod / number, 4),
            "caller_ms": round(1000 * cpu / number, 4),
            "per_second": round(number / seconds, 1),
        }


def service(number: int) -> InferenceService:
    """Return a server as SGLang servers are registered."""
    url = f"http://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:30000"
    return InferenceService(
        id=f"server-{number:05d}", base_url=url, backend="sglang", model_path="/models/policy"
    )


async def repeated(number: int, work: Callable[[], Awaitable[Any]]) -> None:
    """Run `work` several times in sequence."""
    for _ in range(number):
        await work()


async def fleet_rows(store: TrajectoryStore, meter: Meter, repeats: int) -> dict[str, Any]:
    """Measure the reports of servers and samplers, and their reads of one another."""
    lists: dict[str, Any] = {}
    registered = 0
    for count in SERVERS:
        for number in range(registered, count):
            await store.services.register(service(number))
        registered = count

        async def read(count: int = count) -> None:
            found = await store.services.all(alive_within=SERVER_SILENCE_SECONDS * 1000)
            assert len(found) == count

        reads = max(5, repeats * 16 // count)
        lists[str(count)] = await meter.of(reads, partial(repeated, reads, read))
    await store.policies.publish(Policy(version=1, path="/policy/1", num_bytes=8 * 10**9))
    load = ServerLoad(num_running=24, num_waiting=0, token_usage=0.5)

    async def beat() -> None:
        await store.services.heartbeat("server-00000", load=load)
        await store.policies.latest()

    sampler = SamplerInfo(id="sampler:1:x", host="host", pid=os.getpid())
    await store.samplers.register(sampler)
    return {
        "service_list": lists,
        "server_beat": await meter.of(repeats, lambda: repeated(repeats, beat)),
        "sampler_beat": await meter.of(
            repeats, lambda: repeated(repeats, lambda: store.samplers.heartbeat(sampler))
        ),
    }


async def renewal(store: TrajectoryStore, meter: Meter, repeats: int) -> dict[str, float]:
    """Measure the renewal of the leases of a sampler."""
    await store.tasks.add(
        MCPTask(id=f"train/0/q{n}", order=n, num_generations=GENERATIONS, query="What is 3 + 4?")
        for n in range(LEASES // GENERATIONS)
    )
    leases: list[tuple[str, int]] = []
    for _ in range(LEASES):
        found = await store.records.claim(
            "sampler:1:x", lease_seconds=_LEASE_SECONDS, admitted_groups=10**9, max_attempts=3
        )
        assert found is not None
        leases.append((found[0].id, found[0].fence))
    rounds = max(4, repeats // LEASES)
    return await meter.of(
        rounds * LEASES,
        lambda: repeated(rounds, lambda: store.records.renew(leases, _LEASE_SECONDS)),
    )


def prepare_ms(records: Records) -> float:
    """Return the milliseconds that rank 0 takes per record of this kind to build a step."""
    part = round(records.tokens / 2 / records.turns)
    shape = Workload(
        num_groups=4,
        num_records=GENERATIONS,
        prompt_tokens=part,
        num_turns=round(records.turns),
        sampled_tokens=part,
        tool_tokens=part,
    )
    groups = make_groups(shape)
    started = time.thread_time()
    build_step(groups, policy_version=0, token_budget=65_536)
    spent = time.thread_time() - started
    return round(1000 * spent / (shape.num_groups * shape.num_records), 4)


async def measure(repeats: int) -> dict[str, Any]:
    """Measure everything on one mongod."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mongo = stack.enter_context(EmbeddedMongo(folder / "mongo"))
        store = await stack.enter_async_context(open_store(mongo))
        meter = Meter(mongo)
        found = await fleet_rows(store, meter, repeats)
        found["renewal"] = await renewal(store, meter, repeats)
        engine = stack.enter_context(serve_script(Renderer.load(MODEL), lambda _: ""))
        client = await stack.enter_async_context(SGLangClient(engine.base_url))
        call = await meter.of(repeats, lambda: repeated(repeats, client.model_info))
        return found | {
            "control_call": {"caller_ms": call["caller_ms"]},
            "prepare": {name: prepare_ms(records) for name, records in WORKLOADS.items()},
        }


if __name__ == "__main__":
    flags = parser(__doc__, "fleet_cost")
    flags.add_argument("--repeats", type=int, default=1920, help="operations of a kind")
    report(flags, lambda given: asyncio.run(measure(given.repeats)))
