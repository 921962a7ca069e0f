"""This process's estimate of the database server's clock, and detection of clock steps.

Leases expire by the server's clock, and holders renew every third of a lease. A lease that expired
because the clock stepped, or because the server was away or accepted no writes, does not mean that
its holder is dead. Therefore, after a step, a restart, an election, a gap in this process's own
heartbeats or its first heartbeat, leases are judged only after every live holder had time to renew.
"""

import time
from collections import OrderedDict, deque
from datetime import datetime, timedelta

from agentrl.schema import task_of_record, utc_now

_REMEMBERED = 8192
_BEATS_REMEMBERED = 512
STEP_SECONDS = 2.0
"""Smaller differences between two readings are attributed to the network; leases outlast them."""


class ServerClock:
    """Tracks the server's clock from its readings and this process's monotonic clock."""

    def __init__(self) -> None:
        self._read: tuple[datetime, float] | None = None
        self._server: object = None
        self._stepped_at = float("-inf")
        self._beats: deque[float] = deque(maxlen=_BEATS_REMEMBERED)

    def note(self, server_time: datetime, server: object = None) -> None:
        """Record a reading of the clock of the process `server`, taken just now."""
        if self._read is not None:
            step = abs(server_time - self.now())
            if server != self._server or step > timedelta(seconds=STEP_SECONDS):
                self._stepped_at = time.monotonic()
        self._read, self._server = (server_time, time.monotonic()), server

    def now(self) -> datetime:
        """Return the server's time without a request; this host's time before the first reading."""
        if self._read is None:
            return utc_now()
        server_time, read_at = self._read
        return server_time + timedelta(seconds=time.monotonic() - read_at)

    def distrust(self) -> None:
        """Treat the clock as if it had just stepped, because this process cannot tell."""
        self._stepped_at = time.monotonic()

    def beat(self) -> None:
        """Note that the server has just acknowledged a heartbeat of this process.

        A process with heartbeats sends several per lease. A process without heartbeats judges
        leases by the clock alone.
        """
        self._beats.append(time.monotonic())

    def is_settled(self, lease_seconds: float) -> bool:
        """Return whether all live holders of such leases had time to renew since the last step."""
        # One renewal may have coincided with the step; the next comes a third of a lease later.
        now, renewal = time.monotonic(), lease_seconds * 3 / 4
        if now - self._stepped_at <= renewal:
            return False
        # When the server stops accepting writes, a live holder's lease has at least two thirds of
        # its time left. It expires only in a gap that also lacks heartbeats of this process.
        after = now
        for beat in reversed(self._beats):
            if after - beat > lease_seconds / 2:
                return False
            if now - beat > renewal:
                return True
            after = beat
        # A process whose heartbeats have just started cannot know of earlier gaps.
        return not self._beats


class FreshLeases:
    """Leases that this process took or renewed so recently that no other process can hold them."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def note(self, record_id: str, fence: int, lease_seconds: float) -> None:
        """Remember that the server has just granted or extended this lease."""
        # Half the lease is a safe margin: the lease started before the reply arrived, and the two
        # clocks differ.
        self._until[record_id] = fence, time.monotonic() + lease_seconds / 2
        self._until.move_to_end(record_id)
        while len(self._until) > _REMEMBERED:
            self._until.popitem(last=False)

    def forget(self, record_id: str) -> None:
        """Remove a lease that was released or lost."""
        self._until.pop(record_id, None)

    def holds(self, record_id: str, fence: int) -> bool:
        """Return whether this process certainly holds the lease; False means unknown."""
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
    """Leases that end later than a lease taken now would, with the time since their last change.

    Such leases exist if the server's clock was set back after their renewal, or if their holders
    take longer leases than this process. A lease that is not renewed has a dead holder.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, int, datetime], float] = {}

    def dead(
        self, leases: list[tuple[str, int, datetime]], lease_seconds: float
    ) -> list[tuple[str, int, datetime]]:
        """Return the leases unchanged for `lease_seconds`, and forget leases that are gone.

        Args:
            leases: record id, fencing token and expiry of all such leases now.
            lease_seconds: how long a lease lasts without renewal.
        """
        now = time.monotonic()
        self._since = {lease: self._since.get(lease, now) for lease in leases}
        return [lease for lease, since in self._since.items() if now - since > lease_seconds]
