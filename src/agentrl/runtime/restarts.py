"""Restart limits and delays of processes that exited.

A process that fails occasionally is restarted for the whole run; one that fails repeatedly is not.
This module does not know which processes are supervised, or how they start.
"""

import signal
import time
from collections import deque

WINDOW_SECONDS = 600.0
"""Restarts longer ago than this are forgiven."""
MAX_DELAY_SECONDS = 30.0


class Restarts:
    """The restarts of one process: counted, and bounded within `WINDOW_SECONDS`."""

    def __init__(self, most: int = 0, *, first_delay_seconds: float = 1.0) -> None:
        """Create a policy without restarts so far.

        Args:
            most: restarts allowed within `WINDOW_SECONDS`; 0 makes every failure final.
            first_delay_seconds: pause before the first restart; it doubles with every further one.
        """
        self.total = 0
        """Restarts made so far, forgiven ones included."""
        self._most = most
        self._first_delay_seconds = first_delay_seconds
        self._made_at: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Count a restart and return the pause before it; None after too many restarts."""
        now = time.monotonic()
        while self._made_at and now - self._made_at[0] > WINDOW_SECONDS:
            self._made_at.popleft()
        if len(self._made_at) >= self._most:
            return None
        self._made_at.append(now)
        self.total += 1
        return min(MAX_DELAY_SECONDS, self._first_delay_seconds * 2.0 ** (len(self._made_at) - 1))

    def describe(self, status: int) -> str:
        """Describe the exit of a process that is restarted, and the number of its restarts."""
        return (
            f"{ending(status)}; restarting it ({len(self._made_at)} of {self._most} restarts "
            f"within {WINDOW_SECONDS / 60:.0f} min)"
        )


def ending(status: int) -> str:
    """Describe an exit status, in words that follow a process's name."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"
