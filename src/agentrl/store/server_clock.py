"""The database server's clock as this process knows it, and whether it may judge leases by it.

Leases expire by the server's clock, and holders renew every third of a lease. A lease that expired
while the server was away or accepted no writes does not mean that its holder is dead. Therefore,
after a gap in this process's own heartbeats or its first heartbeat, leases are judged only after
every live holder had time to renew.
"""

import time
from collections import OrderedDict, deque
from datetime import datetime, timedelta

from agentrl.schema import task_of_record, utc_now

_REMEMBERED = 8192
_BEATS_REMEMBERED = 512


class ServerClock:
    """Tracks the server's clock from its readings and this process's monotonic clock."""

    def __init__(self) -> None:
        self._read: tuple[datetime, float] | None = None
        self._beats: deque[float] = deque(maxlen=_BEATS_REMEMBERED)

    def note(self, server_time: datetime) -> None:
        """Record a reading of the clock, taken just now."""
        self._read = server_time, time.monotonic()

    def now(self) -> datetime:
        """Return the server's time without a request; this host's time before the first reading."""
        if self._read is None:
            return utc_now()
        server_time, read_at = self._read
        return server_time + timedelta(seconds=time.monotonic() - read_at)

    def beat(self) -> None:
        """Note that the server has just acknowledged a heartbeat of this process.

        A process with heartbeats sends several per lease. A process without heartbeats judges
        leases by the clock alone.
        """
        self._beats.append(time.monotonic())

    def is_settled(self, lease_seconds: float) -> bool:
        """Return whether all live holders of such leases had time to renew since the last gap."""
        # When the server stops accepting writes, a live holder's lease has at least two thirds of
        # its time left. It expires only in a gap that also lacks heartbeats of this process. One
        # renewal may have coincided with its end; the next comes a third of a lease later.
        now, renewal = time.monotonic(), lease_seconds * 3 / 4
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
