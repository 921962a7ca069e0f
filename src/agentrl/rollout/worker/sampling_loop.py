"""The loop of a sampler process: claim slots, run their rollouts, wait, drain.

Input: the run and its slots in the store, and a stop event. Output: finished and scored Records,
and the process's own report in the store. Signals and configuration belong to the caller.
"""

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from agentrl.errors import ConfigError, RunDropped, StoreError
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.worker.admission_limits import (
    ConcurrencyLimit,
    RunWatch,
    WaitingTimes,
    WaitReason,
)
from agentrl.rollout.worker.attempt import LeaseRenewal, MakeSampler, RolloutAttempt, SlotCounts
from agentrl.rollout.worker.branching import check_scorer_of_trees
from agentrl.runtime.ending_tasks import end_tasks
from agentrl.runtime.installation import package_version
from agentrl.runtime.printable import one_line
from agentrl.schema import (
    RECORD_TRANSITIONS,
    TERMINAL_STATUSES,
    Record,
    Run,
    SamplerInfo,
    Split,
    Task,
    utc_now,
)

log = logging.getLogger(__name__)

_BAD_CONTROL = "nothing is sampled until this control is set to a usable value: {}"


@dataclass(frozen=True)
class LoopTimes:
    """Intervals and timeouts of the loop, in seconds."""

    busy_refresh: float = 1.0
    """Maximum age of the run document while there is work."""
    idle_poll: float = 0.2
    """Interval between checks for work when there was none."""
    report: float = 2.0
    """Interval between the process's reports about itself."""
    scoring: float = 3.0
    """Interval between checks for scoring that other processes left behind."""
    log_waiting: float = 30.0
    """Interval between log lines with the reason why the sampler is idle."""
    log_progress: float = 60.0
    """Interval between progress log lines; the first ones come sooner."""
    scoring_grace: float = 5.0
    """Time for running scorers when the process ends."""
    store_patience: float = 60.0
    """Longest outage of the store before the process gives up."""
    wind_up: float = 20.0
    """Time for started groups when the run is completed."""
    resume_grace: float = 30.0
    """How long a process that finds its run over waits for the run to be resumed."""


@dataclass(frozen=True)
class LoopState:
    """Current and past work of a sampler."""

    num_running: int
    max_running: int
    """Rollouts that it would run now, given enough slots."""
    num_servers: int
    counts: SlotCounts
    seconds_waiting: dict[str, float]


class SamplingLoop:
    """Claims slots and runs their rollouts, as many at a time as `ConcurrencyLimit` allows.

    Args:
        context: clients and settings of the process.
        owner: the process's name in leases.
        make_sampler: makes a slot's rollout.
        splits: claim only slots of these splits; None means any.
        times: intervals and patience.
        notice: returns what users should know about the process, or "".
    """

    def __init__(
        self,
        context: RolloutContext,
        owner: str,
        make_sampler: MakeSampler,
        splits: Collection[Split] | None = None,
        times: LoopTimes | None = None,
        notice: Callable[[], str] = str,
    ) -> None:
        self.counts = SlotCounts()
        self._context = context
        self._owner = owner
        self._make_sampler = make_sampler
        self._splits = splits
        self._times = times or LoopTimes()
        self._notice = notice
        self._renewal = LeaseRenewal(context.store, context.rollout.lease_seconds)
        self._watch = RunWatch(
            context.store, context.servers, needs_servers=context.evaluated_route is None
        )
        self._limit = ConcurrencyLimit(context.rollout.target_concurrency)
        self._waiting = WaitingTimes(
            context.store.database_name, log_interval_seconds=self._times.log_waiting
        )
        self._jobs: dict[asyncio.Task[None], RolloutAttempt] = {}
        self._capacity_freed = asyncio.Event()
        self._store_responded_at = time.monotonic()
        self._scoring_checked_at = time.monotonic()
        self._started_groups = 0
        self._wind_up_until: float | None = None
        self._control_problem = ""
        self._cordoned_by = ""
        self._info = SamplerInfo(
            id=owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            generates=context.rollout.scoring != "only",
            release=package_version(),
        )
        self._num_samplers = 1

    @property
    def state(self) -> LoopState:
        """Current work of the loop; readable from any thread."""
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
        """Sample until `stop` is set or the run is over; then drain, unless `abandoned` is set."""
        lease = self._context.rollout.lease_seconds
        chores = [
            asyncio.create_task(self._renewal.run()),
            asyncio.create_task(self._log_progress()),
            # Reports show the reaper whether the server accepts writes, so several are sent per
            # lease.
            asyncio.create_task(self._every(min(self._times.report, lease / 6), self._report)),
            asyncio.create_task(self._every(lease / 3, self._reap)),
        ]
        await self._guard(self._register)
        try:
            await self._claim_until(stop)
            self._info = self._info.model_copy(update={"status": "draining"})
            await self._drain(abandoned)
        finally:
            await end_tasks([*chores, *self._jobs])
        self._info = self._info.model_copy(update={"status": "stopped"})
        await self._guard(self._report)
        log.info("ended: %s", self.counts)

    async def _claim_until(self, stop: asyncio.Event) -> None:
        stopped = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                try:
                    delay = await self._step()
                    self._store_responded_at = time.monotonic()
                except RunDropped:
                    raise
                except StoreError as error:
                    if time.monotonic() - self._store_responded_at > self._times.store_patience:
                        raise
                    log.warning("the store is not responding, retrying: %s", error)
                    delay = 1.0
                if delay is None:
                    return
                if delay > 0:
                    await self._pause(delay, stopped)
        finally:
            stopped.cancel()

    async def _step(self) -> float | None:
        """Do one piece of work; return the delay before the next, or None at the end."""
        idle = not self._jobs
        times = self._times
        await self._watch.refresh(times.busy_refresh if not idle else times.idle_poll / 2)
        self._limit.note(self._num_generating(), self._context.servers.num_requests)
        full = self._is_full()
        if self._watch.run is not None:
            self._follow(self._watch.run)
        if self._watch.run_ended(times.resume_grace):
            return await self._wind_up()
        reason = self._hold_reason()
        if reason is None and full:
            self._switch_waiting(None)
            return times.busy_refresh
        scores_only = self._context.rollout.scoring == "only"
        if reason is None and scores_only:
            reason = "no_scoring"
        if reason is None:
            if await self._claim(self._watch.admitted_groups):
                self._switch_waiting(None)
                return 0.0
            reason = await self._watch.idle_reason()
        self._switch_waiting(reason)
        if (
            reason not in ("bad_control", "cordoned")
            and not full
            and await self._claim_scoring(urgent=idle or scores_only)
        ):
            return 0.0
        if reason in ("no_task", "no_scoring") and idle and await self._all_done():
            log.info("no work is left")
            return None
        return times.idle_poll

    def _follow(self, run: Run) -> None:
        """Follow the run's controls, and warn of values that nobody can follow."""
        control, problems = run.control, run.control_problems
        if control.scorer is not None and self._context.rollout.scoring != "elsewhere":
            try:
                self._context.scoring.check(control.scorer)
                if self._context.has_trees:
                    check_scorer_of_trees(self._context.scoring, control.scorer)
            except ConfigError as error:
                problems = (*problems, f"scorer: {error}")
                # Answers of running rollouts are scored as before.
                former = self._context.live.current.scorer
                control = control.model_copy(update={"scorer": former})
        self._context.live.current = control
        problem = "; ".join(problems)
        if problem and problem != self._control_problem:
            log.warning("run %s: %s", run.name, _BAD_CONTROL.format(one_line(problem)))
        elif self._control_problem and not problem:
            log.info("run %s: all controls can be followed; sampling continues", run.name)
        self._control_problem = problem

    def _hold_reason(self) -> WaitReason | None:
        bad_control: WaitReason | None = "bad_control" if self._control_problem else None
        cordoned: WaitReason | None = "cordoned" if self._cordoned_by else None
        return self._watch.hold_reason() or cordoned or bad_control or self._backoff_reason()

    async def _pause(self, seconds: float, stopped: asyncio.Task[bool]) -> None:
        """Wait, but only until a stop is requested or, at full capacity, a rollout ends."""
        waiting_for: list[asyncio.Task[bool]] = [stopped]
        if self._is_full():
            self._capacity_freed.clear()
            waiting_for.append(asyncio.create_task(self._capacity_freed.wait()))
        await asyncio.wait(waiting_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waiting_for[1:]:
            wait.cancel()

    def _backoff_reason(self) -> WaitReason | None:
        return "trouble" if self.counts.backoff.is_pausing else None

    def _is_full(self) -> bool:
        """Return whether no further slot may be claimed now.

        A rollout that no longer needs the servers makes room at once: they must not idle during its
        last writes or slow scoring. The total number of attempts is bounded as well.
        """
        capacity = self._capacity()
        return self._num_generating() >= capacity or len(self._jobs) >= 2 * capacity

    def _num_generating(self) -> int:
        return sum(attempt.needs_servers for attempt in self._jobs.values())

    def _capacity(self) -> int:
        if self.counts.backoff.is_active:
            return 1
        requested = self._context.live.current.concurrency
        return self._limit.of(
            self._context.servers.pressure,
            num_servers=self._watch.num_servers,
            num_running=self._num_generating(),
            num_samplers=self._num_samplers,
            most=requested or self._context.rollout.max_concurrent_samples_per_process,
        )

    def _switch_waiting(self, reason: WaitReason | None) -> None:
        self._waiting.switch(reason, is_idle=not self._jobs)

    async def _wind_up(self) -> float | None:
        """Finish the groups that were started, to leave none incomplete."""
        assert self._watch.run is not None
        now = time.monotonic()
        if self._wind_up_until is None:
            log.info("the run is %s", self._watch.run.status)
            self._wind_up_until = now + self._times.wind_up
        self._switch_waiting(None)
        if self._watch.run.status == "failed" or now > self._wind_up_until:
            return None
        if self._context.rollout.scoring == "only":
            # Other processes may still finish rollouts, which then have to be scored.
            return 0.0 if await self._claim_scoring(urgent=True) else self._times.idle_poll
        may_claim = not (self._is_full() or self._cordoned_by) and self._watch.num_servers > 0
        # Slots are claimed in order, so every group before the last one claimed was started.
        if may_claim and self._started_groups and await self._claim(self._started_groups):
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
        self._started_groups = max(self._started_groups, record.order + 1)
        self._start(task, record)
        return True

    async def _claim_scoring(self, *, urgent: bool) -> bool:
        """Claim scoring that the rollout's own process left behind."""
        now = time.monotonic()
        if self._context.rollout.scoring == "elsewhere":
            return False
        if not urgent and now - self._scoring_checked_at < self._times.scoring:
            return False
        self._scoring_checked_at = now
        claimed = await self._context.store.scores.claim(
            self._owner, self._context.rollout.lease_seconds
        )
        if claimed is None:
            return False
        record, task = claimed
        self._start(task, record, scoring_only=True)
        return True

    def _start(self, task: Task, record: Record, *, scoring_only: bool = False) -> None:
        attempt = RolloutAttempt(
            task,
            record,
            self._context,
            self._make_sampler,
            self.counts,
            on_generated=self._capacity_freed.set,
        )
        job = attempt.start(scoring_only=scoring_only)
        self._jobs[job] = attempt
        self._renewal.add(attempt)
        job.add_done_callback(self._forget)

    def _forget(self, job: asyncio.Task[None]) -> None:
        self._renewal.remove(self._jobs.pop(job))
        self._capacity_freed.set()

    async def _all_done(self) -> bool:
        if not self._context.rollout.exit_when_done:
            return False
        num_records = 0
        for status in RECORD_TRANSITIONS:
            async for record in self._context.store.records.find(status=status):
                if self._splits is None or record.split in self._splits:
                    if status not in TERMINAL_STATUSES:
                        return False
                    num_records += 1
                    break
        # A run without records waits for its tasks to be added.
        return num_records > 0

    async def _drain(self, abandoned: asyncio.Event) -> None:
        """Wait `drain_seconds` for running rollouts, release the others, and finish scoring."""
        if self._jobs:
            log.info("draining: %d slots still held", len(self._jobs))
        abandoning = asyncio.create_task(abandoned.wait())
        try:
            await self._wait_until_ended("running", self._context.rollout.drain_seconds, abandoning)
            self._release("running", abandoning)
            grace = max(self._times.scoring_grace, self._context.rollout.drain_seconds)
            await self._wait_until_ended("scoring", grace, abandoning)
            self._release("scoring", abandoning)
            await self._wait_until_ended(None, self._times.scoring_grace, abandoning)
        finally:
            abandoning.cancel()
            for attempt in self._jobs.values():
                attempt.cancel("abandon")

    def _release(self, phase: str, abandoning: asyncio.Task[bool]) -> None:
        for attempt in tuple(self._jobs.values()):
            if attempt.phase == phase and not abandoning.done():
                attempt.cancel("release")

    async def _wait_until_ended(
        self, phase: str | None, seconds: float, abandoning: asyncio.Task[bool]
    ) -> None:
        """Wait until no attempt is in this phase (None: any), for `seconds` or until abandoned."""
        deadline = time.monotonic() + seconds
        while not abandoning.done():
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not any(phase in (None, a.phase) for a in self._jobs.values()):
                return
            await asyncio.wait(
                [abandoning, *self._jobs],
                timeout=min(remaining, 0.1),
                return_when="FIRST_COMPLETED",
            )

    async def _register(self) -> None:
        await self._context.store.samplers.register(self._info)
        await self._count_samplers()

    async def _report(self) -> None:
        self._switch_waiting(self._waiting.reason)
        self._info = self._info.model_copy(
            update={
                "num_running": len(self._jobs),
                "num_finished": self.counts.finished,
                "num_output_tokens": self.counts.num_output_tokens,
                "seconds_waiting": {k: round(v, 3) for k, v in self._waiting.seconds.items()},
                "notice": self._control_notice() or self._notice(),
                "heartbeat_at": utc_now(),
            }
        )
        stored = await self._context.store.samplers.heartbeat(self._info)
        if stored.cordoned_by != self._cordoned_by:
            self._cordoned_by = stored.cordoned_by
            told = f"claim nothing more, by {one_line(stored.cordoned_by)}"
            log.info("told to %s", told if stored.cordoned_by else "claim again")
        await self._count_samplers()

    async def _count_samplers(self) -> None:
        samplers = self._context.store.samplers
        self._context.scoring.share_limits(await samplers.count_working())
        self._num_samplers = max(1, await samplers.count_working(claiming=True))

    def _control_notice(self) -> str:
        problem = one_line(self._control_problem)
        return _BAD_CONTROL.format(problem) if problem else ""

    async def _log_progress(self) -> None:
        pause = self._times.log_progress / 8
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._times.log_progress)
            done, tokens = self.counts.finished, self.counts.num_output_tokens
            log.info("rollouts: %d running, %d finished, %d tokens", len(self._jobs), done, tokens)

    async def _reap(self) -> None:
        """Repair what dead processes left behind."""
        # All samplers do this; the random delay spreads them over time.
        await asyncio.sleep(random.random() * self._context.rollout.lease_seconds / 6)
        rollout = self._context.rollout
        await self._context.store.groups.reap(
            rollout.max_attempts, lease_seconds=rollout.lease_seconds
        )

    async def _every(self, seconds: float, chore: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._guard(chore)

    async def _guard(self, chore: Callable[[], Awaitable[None]]) -> None:
        try:
            await chore()
        except StoreError as error:
            log.warning("%s failed, will retry later: %s", chore.__name__.strip("_"), error)
