"""The limits of a sampler's claims: the run's state, the servers' load, and consecutive failures.

Input: the run document, the servers' reports, the outcomes of rollouts. Output: how many rollouts
may run, or why none may. Nothing here claims or runs anything.
"""

import logging
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from agentrl.inference import ServerPool
from agentrl.inference.client.load_balancing import Pressure
from agentrl.schema import ENDED_RUNS, Run
from agentrl.store import TrajectoryStore

log = logging.getLogger(__name__)

SERVER_SILENCE_SECONDS = 30.0
"""A server without a heartbeat for this long counts as gone."""

START_PER_SERVER = 8
"""Rollouts per server before the first report on its load."""
UNKNOWN_PER_SERVER = 64
"""Rollouts per server if no server reports its load."""
_DECREASE_FACTOR = 0.75
_AVERAGE_SECONDS = 10.0

MAX_FAILURES_IN_A_ROW = 3
"""Consecutive failed rollouts after which only one runs at a time."""
MAX_BACKOFF_SECONDS = 60.0

WaitReason = Literal[
    "no_run",
    "paused",
    "cordoned",
    "bad_control",
    "no_server",
    "no_task",
    "no_scoring",
    "admission",
    "trouble",
]
"""Keys of `SamplerInfo.seconds_waiting`; `trouble` is the backoff after failures."""

_HOLDS: frozenset[WaitReason | None] = frozenset(
    {"no_server", "no_run", "paused", "cordoned", "bad_control"}
)
_WAITING_TEXT: dict[WaitReason, str] = {  # `no_server` has its own warning
    "no_run": "the run has not started",
    "paused": "sampling is paused (control.sampling_paused of the run)",
    "cordoned": "this sampler is cordoned (`agentrl store uncordon` ends that)",
    "bad_control": "a control of the run cannot be followed (see the warning above)",
    "no_task": "no slot to claim",
    "no_scoring": "nothing to score",
    "trouble": "rollouts keep failing; running one at a time (see the warnings above)",
    "admission": "the trainer has not admitted further groups yet",
}


class RunWatch:
    """Caches the run document, and keeps the pool's list of servers current."""

    def __init__(
        self, store: TrajectoryStore, servers: ServerPool, *, needs_servers: bool = True
    ) -> None:
        self._store = store
        self._servers = servers
        self._needs_servers = needs_servers
        self.run: Run | None = None
        self.num_servers = 0
        """Number of servers that accept requests."""
        self._read_at = float("-inf")
        self._created_at = time.monotonic()
        self._seen_alive = False

    async def refresh(self, max_age_seconds: float) -> None:
        """Read run and servers again unless they were read within `max_age_seconds`."""
        if time.monotonic() - self._read_at < max_age_seconds:
            return
        run = await self._store.runs.get()
        if run is None and self.run is not None:
            raise self._store.database.run_dropped()
        self.run = run
        services = await self._store.services.all(alive_within=SERVER_SILENCE_SECONDS)
        self._servers.update(services)
        self.num_servers = self._servers.num_servers
        self._read_at = time.monotonic()

    @property
    def admitted_groups(self) -> int:
        """Training groups with orders below this may be claimed."""
        return 0 if self.run is None else self.run.admitted_groups

    def run_ended(self, resume_grace_seconds: float) -> bool:
        """Return whether the run is over.

        A run that was over before this process started may be about to be resumed; it counts as
        over after `resume_grace_seconds`.
        """
        if self.run is None or self.run.status not in ENDED_RUNS:
            self._seen_alive = self._seen_alive or self.run is not None
            return False
        return self._seen_alive or time.monotonic() - self._created_at > resume_grace_seconds

    def hold_reason(self) -> WaitReason | None:
        """Return why no slot may be claimed at all, or None."""
        if self.run is None or self.run.status in ENDED_RUNS:
            return "no_run"
        if self.run.control.sampling_paused:
            return "paused"
        if self.num_servers == 0 and self._needs_servers:
            return "no_server"
        return None

    async def idle_reason(self) -> WaitReason:
        """Return why there was nothing to claim."""
        num_groups = await self._store.tasks.next_train_order()
        return "admission" if num_groups > self.admitted_groups else "no_task"


class ConcurrencyLimit:
    """Number of concurrent rollouts of a sampler, updated after every refresh of the servers.

    A sampler holds no more rollouts than its share of the requests that the servers run at once: a
    further one would only wait there. Rollouts that are with their tools, on average over the last
    seconds, leave their places to others.

    Memory may be short before all places are taken. The limit below is found by additive increase
    and multiplicative decrease (Chiu and Jain 1989), as TCP finds its window: it settles around the
    load that the servers take, and independent samplers reach equal shares of it. Until the servers
    are first saturated, it doubles (slow start).

    Args:
        per_server: rollouts per server, fixed; None follows the servers' load.
    """

    def __init__(self, per_server: int | None) -> None:
        self.current = 0
        """The limit that was last returned."""
        self._per_server = per_server
        self._limit = 0.0
        self._is_starting = True
        self._num_reports = 0
        self._num_elsewhere = 0.0
        self._noted_at: float | None = None

    def note(self, num_running: int, num_requests: int) -> None:
        """Note how many rollouts run now, and how many requests of theirs are at the servers."""
        now = time.monotonic()
        if self._noted_at is not None:
            weight = 1 - math.exp(-(now - self._noted_at) / _AVERAGE_SECONDS)
            num_elsewhere = max(0, num_running - num_requests)
            self._num_elsewhere += weight * (num_elsewhere - self._num_elsewhere)
        self._noted_at = now

    def of(
        self,
        pressure: Pressure,
        *,
        num_servers: int,
        num_running: int,
        most: int,
        num_samplers: int = 1,
    ) -> int:
        """Return how many rollouts may run now."""
        num_servers = max(1, num_servers)
        if self._per_server is not None:
            self.current = min(most, self._per_server * num_servers)
            return self.current
        if not pressure.is_known:
            limit = UNKNOWN_PER_SERVER * num_servers
        else:
            self._limit = min(self._limit or START_PER_SERVER * num_servers, most)
            if pressure.num_reports != self._num_reports:
                self._num_reports = pressure.num_reports
                self._adjust(pressure, num_servers, num_running)
            limit = int(self._limit)
        if pressure.num_places is not None:
            share = math.ceil(pressure.num_places / num_samplers)
            limit = min(limit, share + round(self._num_elsewhere))
        self.current = min(most, limit)
        return self.current

    def _adjust(self, pressure: Pressure, num_servers: int, num_running: int) -> None:
        """Change the limit after a report, once the change before it has taken effect."""
        if pressure.is_general:
            self._is_starting = False
            if num_running <= self._limit:
                self._limit = max(1.0, self._limit * _DECREASE_FACTOR)
        elif num_running >= int(self._limit) and not pressure.may_be_general:
            self._limit += self._limit if self._is_starting else num_servers


@dataclass
class FailureBackoff:
    """Infrastructure failures since the last rollout that finished.

    Every failure costs its slot an attempt, so while rollouts keep failing only one runs at a time,
    after a pause that grows with the length of the outage.
    """

    num_failures: int = 0
    _first_at: float = 0.0
    _last_at: float = 0.0

    def add(self) -> None:
        """Count a failure."""
        self._last_at = time.monotonic()
        if self.num_failures == 0:
            self._first_at = self._last_at
        self.num_failures += 1

    def clear(self) -> None:
        """Reset the count: a rollout finished."""
        self.num_failures = 0

    @property
    def is_active(self) -> bool:
        """Whether several rollouts failed in a row."""
        return self.num_failures >= MAX_FAILURES_IN_A_ROW

    @property
    def is_pausing(self) -> bool:
        """Whether it is too early for the next rollout."""
        outage_seconds = self._last_at - self._first_at
        pause = min(max(outage_seconds, 1.0), MAX_BACKOFF_SECONDS)
        return self.is_active and time.monotonic() < self._last_at + pause


@dataclass
class WaitingTimes:
    """The time spent idle, by reason."""

    run_name: str
    log_interval_seconds: float
    """Interval between log lines with the same reason."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    reason: WaitReason | None = None
    """Why the sampler is idle now; None while there is work."""
    _since: float = field(default_factory=time.monotonic)
    _logged: WaitReason | None = None
    _logged_at: float = float("-inf")
    _lacks_server: bool = False

    def switch(self, reason: WaitReason | None, *, is_idle: bool) -> None:
        """Add the time since the last switch to its reason, and switch to this one.

        Args:
            reason: why nothing is claimed; None while slots are claimed.
            is_idle: whether no rollout runs either. The reason is logged only then, unless running
                rollouts wait for the same reason.
        """
        now = time.monotonic()
        if self.reason is not None:
            self.seconds[self.reason] += now - self._since
        self._since = now
        self.reason = reason
        # A run that is paused or has not started says nothing about its servers.
        if self._lacks_server and reason not in _HOLDS:
            log.info("run %s: an inference server is alive; sampling continues", self.run_name)
            self._lacks_server = False
        if reason is None or not (is_idle or reason == "no_server"):
            return
        if reason != self._logged or now - self._logged_at > self.log_interval_seconds:
            if reason == "no_server":
                self._lacks_server = True
                log.warning(
                    "run %s: no registered inference server is alive, so sampling waits; start one "
                    "with `agentrl serve --run_name %s` and the run's --db_connection_string, or "
                    "check the log of one that should be running",
                    self.run_name,
                    self.run_name,
                )
            else:
                log.info("waiting: %s", _WAITING_TEXT[reason])
            self._logged, self._logged_at = reason, now
