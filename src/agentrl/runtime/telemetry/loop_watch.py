"""`LoopWatch`: detects a blocked event loop, and reports the line that blocks it.

Input: a loop. Output: a warning in the log, which is also available as `notice`. A blocked loop
cannot report itself, so a thread watches it.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Iterator

from agentrl.config.user_code import users_place

logger = logging.getLogger(__name__)

BLOCKED_SECONDS = 10.0
ADVICE_FOR_AGENTS = (
    "an agent blocks all others; declare it with `def` instead of `async def` to run it in its own "
    "thread, or await an async client"
)
_CHECK_SECONDS = 1.0


class LoopWatch:
    """Watches whether an event loop is responsive."""

    def __init__(self, what: str, advice: str) -> None:
        self._what, self._advice = what, advice
        self.notice = ""
        """The last warning, for display; empty if there was none."""

    @contextlib.contextmanager
    def watching(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Watch a loop until the context ends."""
        stopped = threading.Event()
        threading.Thread(target=self._watch, args=(loop, stopped), daemon=True).start()
        try:
            yield
        finally:
            stopped.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, stopped: threading.Event) -> None:
        thread = 0

        def respond() -> None:
            nonlocal thread
            thread = threading.get_ident()
            responded.set()

        while not stopped.wait(_CHECK_SECONDS):
            responded = threading.Event()
            try:
                loop.call_soon_threadsafe(respond)
            except RuntimeError:  # the loop is closed
                return
            # The second wait covers a process that was suspended as a whole.
            if not (responded.wait(BLOCKED_SECONDS) or responded.wait(_CHECK_SECONDS)) and thread:
                self._warn(thread)
            while not responded.wait(_CHECK_SECONDS) and not stopped.is_set():
                pass

    def _warn(self, thread: int) -> None:
        frame = sys._current_frames().get(thread)
        if frame is None:
            return
        position = users_place(traceback.extract_stack(frame))
        notice = (
            f"{self._what} has been blocked for {BLOCKED_SECONDS:g} s at {position}: {self._advice}"
        )
        if notice != self.notice:
            logger.warning("%s", notice)
        self.notice = notice
