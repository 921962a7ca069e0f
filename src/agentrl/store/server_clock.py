"""The database server's clock as one process knows it: what time it is there, and its steps.

Leases expire by the server's clock. A step of it says nothing about their holders, who renew every
third of a lease, and neither does time in which the server was away or took no writes: after a
step, a restart, an election, a gap in this process's own heartbeats or their beginning, leases are
judged only once every live holder has renewed.
"""

import time
from collections import OrderedDict, deque
from datetime import datetime, timedelta

from agentrl.schema import task_of_record, utc_now

_REMEMBERED = 8192
_BEATS_REMEMBERED = 512
STEP_SECONDS = 2.0
"""Smaller differences between two readings are the network's; leases outlast them."""


class ServerClock:
    """Follows the server's clock by readings of it and this process's monotonic clock."""

    def __init__(self) -> None:
        self._read: tuple[datetime, float] | None = None
        self._server: object = None
        self._stepped_at = float("-inf")
        self._beats: deque[float] = deque(maxlen=_BEATS_REMEMBERED)

    def note(self, server_time: datetime, server: object = None) -> None:
        """Take in a reading of the clock, made just now, of the process `server`."""
        if self._read is not None:
            step = abs(server_time - self.now())
            if server != self._server or step > timedelta(seconds=STEP_SECONDS):
                self._stepped_at = time.monotonic()
        self._read, self._server = (server_time, time.monotonic()), server

    def now(self) -> datetime:
        """Return the server's time without asking it; this host's before the first reading."""
        if self._read is None:
            return utc_now()
        server_time, read_at = self._read
        return server_time + timedelta(seconds=time.monotonic() - read_at)

    def distrust(self) -> None:
        """Treat the clock as one that has just stepped: nobody here knows whether it has."""
        self._stepped_at = time.monotonic()

    def beat(self) -> None:
        """Note that the server has just acknowledged a heartbeat of this process.

        A process that beats does so several times in a lease. One that never does judges leases by
        the clock alone.
        """
        self._beats.append(time.monotonic())

    def is_settled(self, lease_seconds: float) -> bool:
        """Return whether all live holders of such leases could renew them since the last step."""
        # One renewal may have met the step, and the next comes a third of a lease later.
        now, renewal = time.monotonic(), lease_seconds * 3 / 4
        if now - self._stepped_at <= renewal:
            return False
        # A live holder's lease runs for two thirds of its time at least when the server stops taking
        # writes, so that it expires only in a gap that no heartbeat of this process met either.
        after = now
        for beat in reversed(self._beats):
            if after - beat > lease_seconds / 2:
                return False
            if now - beat > renewal:
                return True
            after = beat
        # One that began to beat just now cannot know what came before.
        return not self._beats


class FreshLeases:
    """Leases that this process took or renewed so recently that nobody can have taken them away."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def note(self, record_id: str, fence: int, lease_seconds: float) -> None:
        """Remember that the server has just granted this lease, or extended it."""
        # Half of it, as its seconds are counted from before the answer, and by another clock.
        self._until[record_id] = fence, time.monotonic() + lease_seconds / 2
        self._until.move_to_end(record_id)
        while len(self._until) > _REMEMBERED:
            self._until.popitem(last=False)

    def forget(self, record_id: str) -> None:
        """Take the lease for given up."""
        self._until.pop(record_id, None)

    def holds(self, record_id: str, fence: int) -> bool:
        """Return whether the lease is certainly this process's; False means nobody knows."""
        known, until = self._until.get(record_id, (None, 0.0))
        return known == fence and time.monotonic() < until

    def holds_of(self, task_id: str) -> bool:
        """Return whether a Record of this Task is certainly this process's."""
        now = time.monotonic()
        return any(
            now < until and task_of_record(record_id) == task_id
            for record_id, (_, until) in self._until.items()
        )


class UnrenewedLeases:
    """Leases that end later than any lease taken now would, and how long they have been unchanged.

    The server's clock was set back since they were renewed, or their holders take longer leases
    than this process. The dead among them are those that nobody renews.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, int, datetime], float] = {}

    def dead(
        self, leases: list[tuple[str, int, datetime]], lease_seconds: float
    ) -> list[tuple[str, int, datetime]]:
        """Return those that were unchanged for so long, and forget the ones that are gone.

        Args:
            leases: record id, fencing token and expiry of all such leases now.
            lease_seconds: how long a lease lasts without renewal.
        """
        now = time.monotonic()
        self._since = {lease: self._since.get(lease, now) for lease in leases}
        return [lease for lease, since in self._since.items() if now - since > lease_seconds]
