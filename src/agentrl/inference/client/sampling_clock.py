"""`SamplingClock`: seconds in which servers sampled, or could have."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentrl.schema import InferenceService

_LOOK_SECONDS = 0.05
"""How soon a bound is looked at again that has nearly come."""


class SamplingClock:
    """Stands still while all servers are asleep, since their device is the trainer's then.

    So a rollout that waits for the trainer's turn to end uses up none of its own time.
    """

    def __init__(self) -> None:
        self._seconds_asleep = 0.0
        self._asleep_since: float | None = None

    def note(self, services: Sequence[InferenceService]) -> None:
        """Take over the registered servers, as they are from now on."""
        statuses = {service.status for service in services if service.status != "down"}
        now = time.monotonic()
        if self._asleep_since is not None:
            self._seconds_asleep += now - self._asleep_since
        self._asleep_since = now if statuses == {"asleep"} else None

    def now(self) -> float:
        """Return the time in seconds; only differences mean something."""
        real = time.monotonic() if self._asleep_since is None else self._asleep_since
        return real - self._seconds_asleep

    @asynccontextmanager
    async def timeout_at(self, deadline: float) -> AsyncIterator[None]:
        """Bound a block by this clock.

        Raises:
            TimeoutError: the block was cancelled at the deadline.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as bound:
            timer: asyncio.Handle | None = None

            def look() -> None:
                nonlocal timer
                left = deadline - self.now()
                if left > 0:
                    timer = loop.call_later(max(left, _LOOK_SECONDS), look)
                else:
                    bound.reschedule(loop.time())

            look()
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()
