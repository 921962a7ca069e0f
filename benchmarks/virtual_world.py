# ruff: noqa: D102 - methods stand in for those of the same name, which are described there
"""A world in virtual time for `scale_sim.py`: a clock, a store in memory, servers at given rates."""

import asyncio
import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from agentrl.errors import ServerUnreachable
from agentrl.inference.client.sglang_client import ModelInfo
from agentrl.inference.wire import GenerateRequest, GenerateResult, fit_spans
from agentrl.schema import (
    Control,
    DBRecordData,
    DispatchedSamplingTask,
    InferenceService,
    MCPTask,
    Policy,
    Record,
    Run,
    SamplingParams,
    Score,
    ServerLoad,
    VersionSpan,
    utc_now,
)

_CHUNK_TOKENS = 256
"""Tokens between two checks of the server's load; also the resolution of version spans."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__()
        self._selector.select = self._jump  # type: ignore[attr-defined]

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def _jump(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("no event is scheduled")
        self._now += timeout
        return []


def run_virtually(main: Callable[[], Any]) -> Any:
    """Run a coroutine function in virtual time, which `time.monotonic` then also returns."""
    loop = VirtualLoop()
    really = time.monotonic, asyncio.to_thread

    async def inline(work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return work(*args, **kwargs)

    time.monotonic, asyncio.to_thread = loop.time, inline
    try:
        return loop.run_until_complete(main())
    finally:
        time.monotonic, asyncio.to_thread = really
        loop.close()


@dataclass(frozen=True)
class Rates:
    """Assumed, not measured, rates."""

    tokens_per_second: float = 60.0
    """Speed of one generation on an idle server."""
    knee: int = 32
    """Number of generations up to which a server's speed per generation does not drop."""
    load_seconds: float = 4.0
    """Loading new weights (8 GB at 2 GB/s)."""
    move_seconds: float = 2.0
    """Transfer between host memory and device: the trainer's weights and optimizer state (48 GB at
    24 GB/s).
    """
    mean_seconds_between_failures: float = 6 * 3600.0
    """Mean for one server."""
    hang_share: float = 0.2
    """Share of failures in which the server hangs instead of ending."""
    notice_down_seconds: float = 1.0
    notice_hang_seconds: float = 10.0
    kill_hang_seconds: float = 30.0
    restart_seconds: float = 90.0


class SimServer:
    """One inference server: generations in parallel, pauses, updates, failures."""

    def __init__(self, url: str, rates: Rates, places: int | None = None) -> None:
        """Serve at most `places` generations at once, in the order of their priorities; None: all."""
        self.url = url
        self.places = places
        self.waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._num_queued = 0
        self.version = 0
        self.num_running = 0
        self.rates = rates
        self.going = asyncio.Event()
        self.going.set()
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.hangs = False

    async def answer(self) -> None:
        """Behave like an HTTP response: immediate, never while it hangs, an error when dead."""
        if self.hangs and not self._dead.done():
            # Shielded: otherwise, a caller that gives up would cancel what all wait for.
            await asyncio.shield(self._dead)
        if self._dead.done():
            raise ServerUnreachable(f"{self.url} is down")

    def die(self) -> None:
        self._dead.set_result(None)
        self.going.set()

    def restart(self, version: int) -> None:
        self.hangs = False
        self.version = version
        self._dead = asyncio.get_running_loop().create_future()

    async def generate(self, num_tokens: int, priority: int | None = None) -> list[VersionSpan]:
        """Sample; return the versions of the tokens."""
        await self.answer()
        if self.places is not None and self.num_running >= self.places:
            place = asyncio.get_running_loop().create_future()
            self._num_queued += 1
            heapq.heappush(self.waiting, (-(priority or 0), self._num_queued, place))
            await place
            self.num_running -= 1  # the one that ended left it its place
        dead = self._dead
        spans: list[VersionSpan] = []
        num_sampled = 0
        self.num_running += 1
        try:
            while num_sampled < num_tokens:
                await self.going.wait()
                chunk = min(_CHUNK_TOKENS, num_tokens - num_sampled)
                slow_down = max(1.0, self.num_running / self.rates.knee)
                await asyncio.sleep(chunk / self.rates.tokens_per_second * slow_down)
                if dead.done() or self.hangs:
                    await self.answer()
                    raise ServerUnreachable(f"{self.url} restarted")
                spans.append(
                    VersionSpan(version=self.version, start=num_sampled, end=num_sampled + chunk)
                )
                num_sampled += chunk
        finally:
            while self.waiting and self.waiting[0][2].done():  # its client has gone
                heapq.heappop(self.waiting)
            if self.waiting:
                heapq.heappop(self.waiting)[2].set_result(None)
            else:
                self.num_running -= 1
        return spans


class SimClient:
    """Replaces `SGLangClient` for the pool and the publisher."""

    servers: dict[str, SimServer] = {}

    def __init__(self, base_url: str, **_keys: object) -> None:
        self.base_url = base_url
        self._server = self.servers[base_url]

    @classmethod
    def of(cls, base_url: str, _inference: object) -> "SimClient":
        return cls(base_url)

    async def __aenter__(self) -> "SimClient":
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Hold nothing."""

    close = __aexit__

    async def generate(
        self, request: GenerateRequest, _on_partial: object = None
    ) -> GenerateResult:
        count = request.sampling.max_new_tokens
        spans = fit_spans(await self._server.generate(count, request.priority), count)
        return GenerateResult(
            output_ids=np.zeros(count, np.int32),
            output_logprobs=np.zeros(count, np.float32),
            version_spans=spans,
            finish_reason="stop",
            server=self.base_url,
        )

    async def pause(self, _mode: str) -> None:
        await self._server.answer()
        self._server.going.clear()

    async def continue_(self) -> None:
        await self._server.answer()
        self._server.going.set()

    async def update_weights_from_disk(
        self, _path: str, *, weight_version: str, **_options: object
    ) -> None:
        await asyncio.sleep(self._server.rates.load_seconds)
        await self._server.answer()
        self._server.version = int(weight_version)

    async def model_info(self) -> ModelInfo:
        await self._server.answer()
        return ModelInfo(model_path="", weight_version=self._server.version)

    async def server_info(self) -> dict[str, object]:
        await self._server.answer()
        return {"version": "0.5.23", "enable_memory_saver": True}

    async def flush_cache(self, _tags: object = None) -> None:
        await self._server.answer()

    release_memory = resume_memory = flush_cache


def always(value: Any = None) -> Callable[..., Any]:
    """Return an async method that always returns this, whatever it is asked."""

    async def answer(*_: object, **__: object) -> Any:
        return value

    return answer


@dataclass
class SimStore:
    """The part of `TrajectoryStore` that samplers, trainer and publisher use, in memory."""

    num_generations: int
    num_tasks: int
    num_samplers: int = 1
    run: Run = field(default_factory=lambda: Run(name="sim", status="training", control=Control()))
    policy: Policy | None = None
    database_name: str = "sim"
    known: dict[str, InferenceService] = field(default_factory=dict)
    next_order: int = 0
    _freed: list[tuple[int, int]] = field(default_factory=list)
    _opened: dict[int, int] = field(default_factory=dict)
    _fences: dict[str, int] = field(default_factory=dict)
    _versions: dict[str, tuple[int, int]] = field(default_factory=dict)
    _groups: dict[int, list[DBRecordData]] = field(default_factory=dict)
    _ready: list[int] = field(default_factory=list)
    _num_read: int = 0
    rollout_seconds: list[float] = field(default_factory=list)
    first_group_at: float = 0.0

    def __post_init__(self) -> None:
        # Only servers die here: there are no leases, and nobody reports to the store but they.
        self.clock = SimpleNamespace(now=utc_now)
        self.runs = SimpleNamespace(get=self._get_run, set_admission=self._set_admission)
        self.services = SimpleNamespace(
            all=self._services,
            set_status=self._set_service,
            claim_sleeping=self._claim_sleeping_service,
        )
        self.policies = SimpleNamespace(
            publish=self._publish_policy, set_checksum=always(), held_versions=always(frozenset())
        )
        self.tasks = SimpleNamespace(
            next_train_order=always(self.num_tasks), count=always(self.num_tasks)
        )
        self.samplers = SimpleNamespace(
            all=always([]),
            register=always(),
            heartbeat=always(),
            count_working=self._count_samplers,
        )
        self.groups = SimpleNamespace(reap=always())
        self.records = SimpleNamespace(
            renew=always([]),
            claim=self._claim_record,
            release=self._release,
            fail_attempt=self._release,
            finish=always(),
        )
        self.scores = SimpleNamespace(claim=always(), set=self._set_score)
        # `ready_groups` removes groups, so that there is nothing left to reserve or drop.
        self.ledger = SimpleNamespace(
            ready_groups=self._ready_groups,
            num_ready_groups=self._num_ready_groups,
            reserve=always(),
            drop=always(),
            is_exhausted=self._is_exhausted,
        )

    async def _count_samplers(self, **_filter: object) -> int:
        return self.num_samplers

    async def _get_run(self) -> Run:
        return self.run

    async def _set_admission(self, admitted_groups: int) -> None:
        self.run = self.run.model_copy(update={"admitted_groups": admitted_groups})

    async def _services(self, **_filter: object) -> list[InferenceService]:
        return list(self.known.values())

    async def _set_service(self, service_id: str, **changes: Any) -> None:
        updates = {name: value for name, value in changes.items() if value is not None}
        self.known[service_id] = self.known[service_id].model_copy(update=updates)

    async def _claim_sleeping_service(self, service_id: str) -> bool:
        if self.known[service_id].status != "asleep":
            return False
        await self._set_service(service_id, status="updating")
        return True

    async def _publish_policy(self, policy: Policy) -> None:
        self.policy = policy

    async def _is_exhausted(self) -> bool:
        return self._num_read >= self.num_tasks

    async def _claim_record(
        self, owner: str, *, admitted_groups: int, **_options: object
    ) -> tuple[Record, MCPTask] | None:
        if self._freed:
            order, try_number = heapq.heappop(self._freed)
        elif self.next_order < min(admitted_groups, self.num_tasks):
            order = self.next_order
            try_number = self._opened.get(order, 0)
            self._opened[order] = try_number + 1
            if try_number + 1 == self.num_generations:
                self.next_order += 1
                del self._opened[order]
        else:
            return None
        place = {"split": "train", "order": order}
        task = MCPTask.model_validate(
            {
                "id": f"train/0/{order}",
                **place,
                "num_generations": self.num_generations,
                "query": "",
            }
        )
        record_id = f"{task.id}/{try_number}"
        fence = self._fences[record_id] = self._fences.get(record_id, 0) + 1
        running = {"status": "running", "attempt": 1, "fence": fence, "traj_id": try_number}
        record = Record.model_validate({"id": record_id, "task_id": task.id, **place, **running})
        return record, task

    async def _release(self, record_id: str, *_attempt: object) -> None:
        _, _, order, try_number = record_id.split("/")
        heapq.heappush(self._freed, (int(order), int(try_number)))

    def sampled(self, record_id: str, oldest: int, newest: int) -> None:
        """Record the versions that sampled a record."""
        self._versions[record_id] = (oldest, newest)

    async def _set_score(self, record_id: str, _fence: int, score: Score) -> None:
        task_id, _, number = record_id.rpartition("/")
        order = int(task_id.rpartition("/")[2])
        oldest, newest = self._versions.pop(record_id)
        del self._fences[record_id]
        turn = DispatchedSamplingTask(
            id=f"{record_id}/0",
            record_id=record_id,
            task_id=task_id,
            attempt=1,
            index=0,
            added_ids=[0],
            output_ids=[1, 2],
            output_logprobs=[-1.0, -1.0],
            version_spans=(
                VersionSpan(version=oldest, start=0, end=1),
                VersionSpan(version=newest, start=1, end=2),
            ),
            finish_reason="stop",
            sampling_params=SamplingParams(),
        )
        group = self._groups.setdefault(order, [])
        group.append(
            DBRecordData(
                record_id=record_id,
                task_id=task_id,
                traj_id=int(number),
                split="train",
                order=order,
                attempt=1,
                outcome="answered",
                score=score,
                turn_ids=(turn.id,),
                num_tokens=3,
                min_version=oldest,
                max_version=newest,
                group_completed=True,
                turns=(turn,),
            )
        )
        if len(group) == self.num_generations:
            heapq.heappush(self._ready, order)
            self.first_group_at = self.first_group_at or time.monotonic()

    async def _num_ready_groups(self, _consumer: str) -> int:
        return len(self._ready)

    async def _ready_groups(
        self, _consumer: str, *, limit: int, **_options: object
    ) -> list[list[DBRecordData]]:
        found: list[list[DBRecordData]] = []
        while self._ready and len(found) < limit:
            found.append(self._groups.pop(heapq.heappop(self._ready)))
            self._num_read += 1
        return found


async def report_load(store: SimStore, server: SimServer, *, says_places: bool) -> None:
    """Report a server's load once a second, as its supervisor does."""
    assert server.places is not None
    while True:
        load = ServerLoad(
            num_running=server.num_running,
            num_waiting=len(server.waiting),
            max_running=server.places if says_places else 0,
            token_usage=0.5 * server.num_running / server.places,
        )
        store.known[server.url] = store.known[server.url].model_copy(update={"load": load})
        await asyncio.sleep(1.0)


async def fail_now_and_then(store: SimStore, server: SimServer, rates: Rates, seed: int) -> None:
    """Let a server fail, be detected and come back, as with its supervisor."""
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(rng.expovariate(1 / rates.mean_seconds_between_failures))
        if rng.random() < rates.hang_share:
            server.hangs = True
            await asyncio.sleep(rates.notice_hang_seconds)
            await store.services.set_status(server.url, status="down")
            await asyncio.sleep(rates.kill_hang_seconds - rates.notice_hang_seconds)
            server.die()
        else:
            server.die()
            await asyncio.sleep(rates.notice_down_seconds)
            await store.services.set_status(server.url, status="down")
        await asyncio.sleep(rates.restart_seconds)
        version = store.policy.version if store.policy else 0
        server.restart(version)
        await store.services.set_status(server.url, status="up", policy_version=version)
