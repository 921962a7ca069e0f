"""Plain scoring functions in threads: a few at a time, and none for ever.

In: a function of the user's and its arguments. Out: what it returns or raises. A thread cannot be
ended: one that hangs is left behind, and its place goes to the next.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from agentrl.errors import ScoringError


class ScorerThreads:
    """Runs functions in threads that end with the process.

    Args:
        num_places: functions that run at the same time.
        max_seconds: how long one may take.
    """

    def __init__(self, num_places: int, max_seconds: float) -> None:
        self._places = threading.Semaphore(num_places)
        self._max_seconds = max_seconds

    async def run(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns.

        Args:
            what: whose function it is, to begin messages with.
            function: what is run.
            *arguments: its arguments.

        Raises:
            ScoringError: it takes too long.
        """
        loop = asyncio.get_running_loop()
        begun, ended = loop.create_future(), Future[Any]()
        has_place = threading.Lock()

        def leave() -> None:
            if has_place.acquire(blocking=False):  # once
                self._places.release()

        def work() -> None:
            self._places.acquire()
            try:
                if ended.set_running_or_notify_cancel():
                    loop.call_soon_threadsafe(begun.set_result, None)
                    ended.set_result(function(*arguments))
            except StopIteration as end:  # no future can hold it
                words = "StopIteration: next() found nothing"
                ended.set_exception(RuntimeError(words).with_traceback(end.__traceback__))
            except BaseException as error:  # noqa: BLE001  it goes to the caller
                ended.set_exception(error)
            finally:
                leave()

        threading.Thread(target=work, name="scorer", daemon=True).start()
        try:
            await asyncio.shield(begun)
        except asyncio.CancelledError:
            ended.cancel()
            raise
        limit = asyncio.timeout(self._max_seconds)
        try:
            async with limit:
                return await asyncio.wrap_future(ended)
        except TimeoutError:
            if not limit.expired():
                raise
            leave()
            raise ScoringError(f"{what} gave no score within {self._max_seconds:g} s") from None
