"""Plain scoring functions in threads: with limited concurrency and a timeout.

Input: a function of the user and its arguments. Output: its result or exception, and a log line
with the position of a slow function. Threads cannot be killed: a hanging one is abandoned, and its
slot is given to the next function.
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
    """Runs functions in threads that end with the process."""

    def __init__(self, num_slots: int) -> None:
        self._slots = threading.Semaphore(num_slots)

    async def run(
        self, owner: str, max_seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Run a function and return its result.

        Args:
            owner: name of the function's owner; messages start with it.
            max_seconds: timeout, counted from the start of the function.
            function: the function to run.
            *arguments: its arguments.
        """
        loop = asyncio.get_running_loop()
        started, outcome = loop.create_future(), Future[Any]()
        released = threading.Lock()

        def release_once() -> None:
            if released.acquire(blocking=False):
                self._slots.release()

        def run_function() -> None:
            self._slots.acquire()
            try:
                if outcome.set_running_or_notify_cancel():
                    loop.call_soon_threadsafe(started.set_result, None)
                    outcome.set_result(function(*arguments))
            except StopIteration as end:  # a future cannot hold it
                message = "StopIteration: next() found nothing"
                outcome.set_exception(RuntimeError(message).with_traceback(end.__traceback__))
            except BaseException as error:  # noqa: BLE001  raised in the caller
                outcome.set_exception(error)
            finally:
                release_once()

        thread = threading.Thread(target=run_function, name="scorer", daemon=True)
        thread.start()
        try:
            await asyncio.shield(started)
        except asyncio.CancelledError:
            outcome.cancel()
            raise
        returned = asyncio.wrap_future(outcome)
        await asyncio.wait([returned], timeout=min(LONG_SECONDS, max_seconds))
        if not returned.done() and max_seconds > LONG_SECONDS:
            logger.warning(
                "%s is slow: running for %.0f s, now at %s",
                owner,
                LONG_SECONDS,
                _position_of(thread),
            )
            await asyncio.wait([returned], timeout=max_seconds - LONG_SECONDS)
        if returned.done():
            return returned.result()
        returned.cancel()
        release_once()
        text = (
            f"{owner} returned no score within {max_seconds:g} s; it was at {_position_of(thread)}"
        )
        raise ScorerTimeout(text, kind=f"{owner}: too slow", is_certain=True)


def _position_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "its end" if frame is None else users_place(traceback.extract_stack(frame))
