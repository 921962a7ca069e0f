"""The loop of a sampler process: claim, play, wait, drain."""

import asyncio
import logging
import os
import random
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from agentrl.errors import StoreError
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.worker.attempt import MakeSampler, Slot, SlotCounts
from agentrl.rollout.worker.concurrency import ConcurrencyLimit
from agentrl.rollout.worker.lease_renewal import LeaseKeeper
from agentrl.rollout.worker.run_watch import RunWatch, WaitReason
from agentrl.schema import TERMINAL_STATUSES, Record, SamplerInfo, Split, Task, utc_now

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopTimes:
    """How often things are done, in seconds."""

    busy_refresh: float = 1.0
    """Age up to which the run document is trusted while there is work."""
    idle_poll: float = 0.2
    """Between two looks for work when there was none."""
    report: float = 2.0
    """Between two reports of the process about itself."""
    scoring: float = 3.0
    """Between two looks for scoring that others left over."""
    say_waiting: float = 30.0
    """Between two log lines that say why nothing happens."""
    scoring_grace: float = 5.0
    """Time that scoring under way is given when the process ends."""
    store_patience: float = 60.0
    """How long the store may be away before the process gives up."""
    wind_up: float = 20.0
    """Time given to groups that were begun when the run is completed."""
    resume_grace: float = 30.0
    """How long a process that finds its run over waits for the run to be resumed."""


@dataclass
class _Waiting:
    """Books the time in which there was nothing to do, by reason."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    reason: WaitReason | None = None
    _since: float = field(default_factory=time.monotonic)
    _said: WaitReason | None = None
    _said_at: float = float("-inf")

    def because(self, reason: WaitReason | None, *, idle: bool, say_every: float) -> None:
        """Begin a spell of waiting (None: of work); the last one is booked."""
        now = time.monotonic()
        if self.reason is not None:
            self.seconds[self.reason] += now - self._since
        self._since = now
        counted = reason if idle else None
        if counted is not None and (counted != self._said or now - self._said_at > say_every):
            log.info("waiting: %s", _WAITING_TEXT[counted])
            self._said, self._said_at = counted, now
        self.reason = counted


_WAITING_TEXT: dict[WaitReason, str] = {
    "no_run": "the run has not begun",
    "paused": "sampling is paused (control.sampling_paused of the run)",
    "no_server": "no inference server is up",
    "no_task": "there is no slot to claim",
    "no_scoring": "there is nothing to score",
    "trouble": "rollouts keep failing, only one is tried now and then (see the warnings above)",
    "admission": "the trainer has not yet admitted further groups",
}


@dataclass(frozen=True)
class LoopState:
    """What a sampler is doing, for whoever wants to know."""

    num_running: int
    max_running: int
    """Slots that it would play now if there were enough of them."""
    num_servers: int
    counts: SlotCounts
    seconds_waiting: dict[str, float]


class SamplingLoop:
    """Claims slots and plays them, as many at a time as `ConcurrencyLimit` says.

    Args:
        context: clients and settings of the process.
        owner: the process's name in leases.
        make_sampler: builds the sampler of a slot.
        splits: claim only slots of these splits; None means any.
        times: how often things are done.
    """

    def __init__(
        self,
        context: RolloutContext,
        owner: str,
        make_sampler: MakeSampler,
        splits: Collection[Split] | None = None,
        times: LoopTimes | None = None,
    ) -> None:
        self.counts = SlotCounts()
        self._context = context
        self._owner = owner
        self._make_sampler = make_sampler
        self._splits = splits
        self._times = times or LoopTimes()
        self._keeper = LeaseKeeper(context.store, context.rollout.lease_seconds)
        self._watch = RunWatch(context.store, context.servers)
        self._limit = ConcurrencyLimit(context.rollout.target_concurrency)
        self._waiting = _Waiting()
        self._jobs: dict[asyncio.Task[None], Slot] = {}
        self._room_made = asyncio.Event()
        self._store_seen_at = time.monotonic()
        self._scoring_looked_at = time.monotonic()
        self._begun_groups = 0
        self._wind_up_until: float | None = None
        self._info = SamplerInfo(id=owner, host=socket.gethostname(), pid=os.getpid())

    @property
    def state(self) -> LoopState:
        """What the loop is doing; may be read from any thread."""
        return LoopState(
            num_running=len(self._jobs),
            max_running=self._limit.current,
            num_servers=self._watch.num_servers,
            counts=self.counts,
            seconds_waiting={
                str(reason): spent for reason, spent in tuple(self._waiting.seconds.items())
            },
        )

    async def run(self, stop: asyncio.Event, abandoned: asyncio.Event) -> None:
        """Sample until `stop` is set or the run is over; then drain, unless `abandoned` is set.

        Raises:
            StoreError: the store was away for longer than `store_patience`.
        """
        chores = [
            asyncio.create_task(self._keeper.run()),
            asyncio.create_task(self._every(self._times.report, self._report)),
            asyncio.create_task(self._every(self._context.rollout.lease_seconds / 3, self._reap)),
        ]
        await self._guard(self._register)
        try:
            await self._claim_until(stop)
            self._info = self._info.model_copy(update={"status": "draining"})
            await self._drain(abandoned)
        finally:
            for job in (*chores, *self._jobs):
                job.cancel()
            await asyncio.gather(*chores, *self._jobs, return_exceptions=True)
        self._info = self._info.model_copy(update={"status": "stopped"})
        await self._guard(self._report)
        log.info("ended: %s", self.counts)

    async def _claim_until(self, stop: asyncio.Event) -> None:
        stopped = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                try:
                    delay = await self._step()
                    self._store_seen_at = time.monotonic()
                except StoreError as error:
                    if time.monotonic() - self._store_seen_at > self._times.store_patience:
                        raise
                    log.warning("the store does not answer, trying again: %s", error)
                    delay = 1.0
                if delay is None:
                    return
                if delay > 0:
                    await self._pause(delay, stopped)
        finally:
            stopped.cancel()

    async def _step(self) -> float | None:
        """Do one thing; return how long to wait for the next, or None at the end of it all."""
        idle = not self._jobs
        times = self._times
        await self._watch.refresh(times.busy_refresh if not idle else times.idle_poll / 2)
        full = self._is_full()
        if self._watch.run is not None:
            self._context.live.current = self._watch.run.control
        if self._watch.run_ended(times.resume_grace):
            return await self._wind_up()
        reason = self._watch.hold_reason() or self._trouble()
        if reason is None and full:
            self._wait_because(None)
            return times.busy_refresh
        scores_only = self._context.rollout.scoring == "only"
        if reason is None and scores_only:
            reason = "no_scoring"
        if reason is None:
            if await self._claim(self._watch.admitted_groups):
                self._wait_because(None)
                return 0.0
            reason = await self._watch.idle_reason()
        self._wait_because(reason)
        if not full and await self._claim_scoring(urgent=idle or scores_only):
            return 0.0
        if reason in ("no_task", "no_scoring") and idle and await self._all_done():
            log.info("nothing is left to do")
            return None
        return times.idle_poll

    async def _pause(self, seconds: float, stopped: asyncio.Task[bool]) -> None:
        """Wait, but not beyond the end of a rollout when all were taken, nor beyond a stop."""
        waits: list[asyncio.Task[bool]] = [stopped]
        if self._is_full():
            self._room_made.clear()
            waits.append(asyncio.create_task(self._room_made.wait()))
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits[1:]:
            wait.cancel()

    def _trouble(self) -> WaitReason | None:
        trouble = self.counts.trouble
        waits = trouble.persists and time.monotonic() < trouble.retry_at
        return "trouble" if waits else None

    def _is_full(self) -> bool:
        """Return whether no further slot may be claimed now.

        A rollout that asks the servers for nothing more makes room at once: they should not wait
        for its last writes, nor for a slow judge. What is held altogether is bounded as well.
        """
        capacity = self._capacity()
        return self._num_playing() >= capacity or len(self._jobs) >= 2 * capacity

    def _num_playing(self) -> int:
        return sum(slot.is_playing for slot in self._jobs.values())

    def _capacity(self) -> int:
        if self.counts.trouble.persists:
            return 1
        asked = self._context.live.current.concurrency
        return self._limit.of(
            self._context.servers.pressure,
            num_servers=self._watch.num_servers,
            num_running=self._num_playing(),
            most=asked or self._context.rollout.max_concurrent_samples_per_process,
        )

    def _wait_because(self, reason: WaitReason | None) -> None:
        self._waiting.because(reason, idle=not self._jobs, say_every=self._times.say_waiting)

    async def _wind_up(self) -> float | None:
        """Play out the groups that were begun, so that the run leaves none half played."""
        assert self._watch.run is not None
        now = time.monotonic()
        if self._wind_up_until is None:
            log.info("the run is %s", self._watch.run.status)
            self._wind_up_until = now + self._times.wind_up
        self._wait_because(None)
        if self._watch.run.status == "failed" or now > self._wind_up_until:
            return None
        if self._context.rollout.scoring == "only":
            # What the others are still playing out will have to be scored.
            return 0.0 if await self._claim_scoring(urgent=True) else self._times.idle_poll
        may_claim = not self._is_full() and self._watch.num_servers > 0
        # Slots are claimed in order, so every group before the last one claimed was begun.
        if may_claim and self._begun_groups and await self._claim(self._begun_groups):
            return 0.0
        return self._times.idle_poll if self._jobs else None

    async def _claim(self, admitted_groups: int) -> bool:
        rollout = self._context.rollout
        claimed = await self._context.store.records.claim(
            self._owner,
            lease_seconds=rollout.lease_seconds,
            admitted_groups=admitted_groups,
            max_attempts=rollout.max_attempts,
            splits=self._splits,
            resumable=self._context.resumable,
        )
        if claimed is None:
            return False
        record, task = claimed
        self._begun_groups = max(self._begun_groups, record.order + 1)
        slot = self._slot(task, record)
        self._hold(slot, slot.start())
        return True

    async def _claim_scoring(self, *, urgent: bool) -> bool:
        """Take up scoring that its rollout's process did not get done."""
        now = time.monotonic()
        if self._context.rollout.scoring == "elsewhere":
            return False
        if not urgent and now - self._scoring_looked_at < self._times.scoring:
            return False
        self._scoring_looked_at = now
        claimed = await self._context.store.scores.claim(
            self._owner, self._context.rollout.lease_seconds
        )
        if claimed is None:
            return False
        record, task, _ = claimed
        slot = self._slot(task, record)
        self._hold(slot, slot.start(scoring_only=True))
        return True

    def _slot(self, task: Task, record: Record) -> Slot:
        return Slot(
            task,
            record,
            self._context,
            self._make_sampler,
            self.counts,
            on_played=self._room_made.set,
        )

    def _hold(self, slot: Slot, job: asyncio.Task[None]) -> None:
        self._jobs[job] = slot
        self._keeper.hold(slot)
        job.add_done_callback(self._let_go)

    def _let_go(self, job: asyncio.Task[None]) -> None:
        self._keeper.let_go(self._jobs.pop(job))
        self._room_made.set()

    async def _all_done(self) -> bool:
        if not self._context.rollout.exit_when_done:
            return False
        num_records = 0
        for status in ("pending", "running", "finished", "scored", "failed"):
            async for record in self._context.store.records.find(status=status):
                if self._splits is None or record.split in self._splits:
                    if status not in TERMINAL_STATUSES:
                        return False
                    num_records += 1
                    break
        # Nothing at all means that the tasks are still to come.
        return num_records > 0

    async def _drain(self, abandoned: asyncio.Event) -> None:
        """Let rollouts end within `drain_seconds`, hand the others back, and let scoring finish."""
        if self._jobs:
            log.info("draining: %d slots are held", len(self._jobs))
        given_up = asyncio.create_task(abandoned.wait())
        try:
            await self._until_ended("running", self._context.rollout.drain_seconds, given_up)
            self._hand_back("running", given_up)
            grace = max(self._times.scoring_grace, self._context.rollout.drain_seconds)
            await self._until_ended("scoring", grace, given_up)
            self._hand_back("scoring", given_up)
            await self._until_ended(None, self._times.scoring_grace, given_up)
        finally:
            given_up.cancel()
            for slot in self._jobs.values():
                slot.cancel("abandon")

    def _hand_back(self, phase: str, given_up: asyncio.Task[bool]) -> None:
        for slot in tuple(self._jobs.values()):
            if slot.phase == phase and not given_up.done():
                slot.cancel("hand_back")

    async def _until_ended(
        self, phase: str | None, seconds: float, given_up: asyncio.Task[bool]
    ) -> None:
        """Wait until no slot is in this phase (None: any), at most `seconds`, unless given up."""
        deadline = time.monotonic() + seconds
        while not given_up.done():
            left = deadline - time.monotonic()
            if left <= 0 or not any(phase in (None, s.phase) for s in self._jobs.values()):
                return
            await asyncio.wait(
                [given_up, *self._jobs], timeout=min(left, 0.1), return_when="FIRST_COMPLETED"
            )

    async def _register(self) -> None:
        await self._context.store.samplers.register(self._info)

    async def _report(self) -> None:
        self._wait_because(self._waiting.reason)
        self._info = self._info.model_copy(
            update={
                "num_running": len(self._jobs),
                "num_finished": self.counts.finished,
                "num_output_tokens": self.counts.num_output_tokens,
                "seconds_waiting": {k: round(v, 3) for k, v in self._waiting.seconds.items()},
                "heartbeat_at": utc_now(),
            }
        )
        await self._context.store.samplers.heartbeat(self._info)

    async def _reap(self) -> None:
        """Repair what dead processes left; every sampler does it, at times of its own."""
        await asyncio.sleep(random.random() * self._context.rollout.lease_seconds / 6)
        await self._context.store.groups.reap(self._context.rollout.max_attempts)

    async def _every(self, seconds: float, chore: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._guard(chore)

    async def _guard(self, chore: Callable[[], Awaitable[None]]) -> None:
        try:
            await chore()
        except StoreError as error:
            log.warning("%s failed, trying again later: %s", chore.__name__.strip("_"), error)
