"""Bounds what a sampler process asks of a judge: requests a minute, and none while it is down.

The records whose judge may not be asked wait for their scores, like those of a judge that failed.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Failed requests in a row after which a judge is not asked for a while."""
_FIRST_PAUSE_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 600.0
_LONGEST_QUEUE_SECONDS = 30.0
"""Longest wait for a turn; beyond it, the record waits in the store instead."""

_num_sharers = 1


class MayNotAsk(Exception):
    """A judge may not be asked now. Never leaves `ask_models`."""


def share_between(num_samplers: int) -> None:
    """Divide the judges' requests a minute by the samplers that are at work now."""
    global _num_sharers
    _num_sharers = max(1, num_samplers)


class JudgeGate:
    """What this process may ask of one judge.

    Args:
        name: the judge, for messages.
        clock: returns monotonic seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._next_turn = float("-inf")
        self._num_failures = 0
        self._pause = _FIRST_PAUSE_SECONDS
        self._paused_until = float("-inf")
        self._is_probing = False

    @asynccontextmanager
    async def request(self, requests_per_minute: float | None) -> AsyncIterator[None]:
        """Wait until one more request may be sent, and note how it ends in the block.

        An exception is a failure of the judge; a cancellation says nothing.

        Args:
            requests_per_minute: of all samplers together; None for no limit.
        """
        await self._turn(requests_per_minute)
        self._is_probing = self._is_tripped
        try:
            yield
        except Exception:
            self._note_failure()
            raise
        else:
            self._note_success()
        finally:
            self._is_probing = False

    async def _turn(self, requests_per_minute: float | None) -> None:
        self._check_open()
        if requests_per_minute is None:
            return
        now = self._clock()
        turn = max(now, self._next_turn)
        if turn - now > _LONGEST_QUEUE_SECONDS:
            raise MayNotAsk(f"more than {requests_per_minute:g} requests per minute")
        self._next_turn = turn + 60 * _num_sharers / requests_per_minute
        await asyncio.sleep(turn - now)
        self._check_open()

    @property
    def _is_tripped(self) -> bool:
        return self._num_failures >= MAX_FAILURES

    def _check_open(self) -> None:
        remaining = self._paused_until - self._clock()
        if remaining > 0:
            raise MayNotAsk(f"not asked for {remaining:.0f} s, after failures in a row")
        if self._is_probing:
            raise MayNotAsk("one request tries whether it is back")

    def _note_failure(self) -> None:
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES:
            logger.warning(
                "judge %s failed %d times in a row: it is asked again after growing pauses of up to "
                "%.0f s, and the records wait for their scores",
                self._name,
                MAX_FAILURES,
                _LONGEST_PAUSE_SECONDS,
            )
        # Requests that were under way when the pause began do not lengthen it.
        if self._is_tripped and self._clock() >= self._paused_until:
            self._paused_until = self._clock() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def _note_success(self) -> None:
        if self._is_tripped:
            logger.info("judge %s answers again", self._name)
        self._num_failures = 0
        self._pause = _FIRST_PAUSE_SECONDS
        self._paused_until = float("-inf")


@cache
def judge_gate(base_url: str, model: str) -> JudgeGate:
    """Return the gate of a judge, one in a process."""
    return JudgeGate(f"{model} at {base_url}")
