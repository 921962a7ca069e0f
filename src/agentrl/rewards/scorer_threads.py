"""Plain scoring functions in threads: with limited concurrency and a timeout.

Input: a function of the user and its arguments. Output: its result or exception, and a log line
with the position of a slow function. Threads cannot be killed: a hanging one is abandoned, and its
place is given to the next function.
"""

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from agentrl.config.user_code import users_place
from agentrl.errors import ScorerTimeout

logger = logging.getLogger(__name__)

LONG_SECONDS = 30.0
"""Time after which the position of a running function is logged."""


class ScorerThreads:
    """Runs functions in threads that end with the process.

    Args:
        num_places: functions that run at the same time.
    """

    def __init__(self, num_places: int) -> None:
        self._places = threading.Semaphore(num_places)

    async def run(
        self, what: str, max_seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Run a function and return its result.

        Args:
            what: owner of the function, as the start of messages.
            max_seconds: timeout, counted from the start of the function.
            function: the function to run.
            *arguments: its arguments.

        Raises:
            ScorerTimeout: it takes too long.
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

        thread = threading.Thread(target=work, name="scorer", daemon=True)
        thread.start()
        try:
            await asyncio.shield(begun)
        except asyncio.CancelledError:
            ended.cancel()
            raise
        returned = asyncio.wrap_future(ended)
        await asyncio.wait([returned], timeout=min(LONG_SECONDS, max_seconds))
        if not returned.done() and max_seconds > LONG_SECONDS:
            logger.warning(
                "%s is slow: running for %.0f s, now at %s", what, LONG_SECONDS, _place_of(thread)
            )
            await asyncio.wait([returned], timeout=max_seconds - LONG_SECONDS)
        if returned.done():
            return returned.result()
        returned.cancel()
        leave()
        text = f"{what} returned no score within {max_seconds:g} s; it was at {_place_of(thread)}"
        raise ScorerTimeout(text, kind=f"{what}: too slow", is_certain=True)


def _place_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "its end" if frame is None else users_place(traceback.extract_stack(frame))
