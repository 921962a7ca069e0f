"""Restart limits and delays of processes that exited.

A process that fails occasionally is restarted for the whole run; one that fails repeatedly is not.
Independent of which processes are supervised, and of how they start.
"""

import signal
import time
from collections import deque

WINDOW_SECONDS = 600.0
"""Older restarts are not counted against the limit."""
MAX_DELAY_SECONDS = 30.0


class Restarts:
    """The restarts of one process: counted, and bounded within `WINDOW_SECONDS`."""

    def __init__(self, max_restarts: int = 0, *, first_delay_seconds: float = 1.0) -> None:
        """Create a policy without restarts so far.

        Args:
            max_restarts: restarts allowed within `WINDOW_SECONDS`; 0 makes every failure final.
            first_delay_seconds: pause before the first restart; it doubles with every further one.
        """
        self.total = 0
        """All restarts so far, including those outside the window."""
        self._max_restarts = max_restarts
        self._first_delay_seconds = first_delay_seconds
        self._restart_times: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Count a restart and return the pause before it; None after too many restarts."""
        now = time.monotonic()
        while self._restart_times and now - self._restart_times[0] > WINDOW_SECONDS:
            self._restart_times.popleft()
        if len(self._restart_times) >= self._max_restarts:
            return None
        self._restart_times.append(now)
        self.total += 1
        return min(
            MAX_DELAY_SECONDS, self._first_delay_seconds * 2.0 ** (len(self._restart_times) - 1)
        )

    def describe(self, status: int) -> str:
        """Describe the exit of a process that is restarted, and the number of its restarts."""
        return (
            f"{ending(status)}; restarting it ({len(self._restart_times)} of "
            f"{self._max_restarts} restarts within {WINDOW_SECONDS / 60:.0f} min)"
        )


def ending(status: int) -> str:
    """Describe an exit status as a phrase that follows the name of a process."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"
