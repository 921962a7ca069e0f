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
_LOOK_SECONDS = 1.0


class LoopWatch:
    """Watches whether an event loop is responsive.

    Args:
        what: whose loop it is, for the message.
        advice: what to do about it.
    """

    def __init__(self, what: str, advice: str) -> None:
        self._what, self._advice = what, advice
        self.notice = ""
        """The last warning, for display; empty if there was none."""

    @contextlib.contextmanager
    def watching(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Watch a loop until the context ends."""
        ended = threading.Event()
        threading.Thread(target=self._look, args=(loop, ended), daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _look(self, loop: asyncio.AbstractEventLoop, ended: threading.Event) -> None:
        thread = 0

        def beat() -> None:
            nonlocal thread
            thread = threading.get_ident()
            went_on.set()

        while not ended.wait(_LOOK_SECONDS):
            went_on = threading.Event()
            try:
                loop.call_soon_threadsafe(beat)
            except RuntimeError:  # it is closed
                return
            # The second wait covers a process that was suspended as a whole.
            if not (went_on.wait(BLOCKED_SECONDS) or went_on.wait(_LOOK_SECONDS)) and thread:
                self._say(thread)
            while not went_on.wait(_LOOK_SECONDS) and not ended.is_set():
                pass

    def _say(self, thread: int) -> None:
        frame = sys._current_frames().get(thread)
        if frame is None:
            return
        place = users_place(traceback.extract_stack(frame))
        notice = (
            f"{self._what} has been blocked for {BLOCKED_SECONDS:g} s at {place}: {self._advice}"
        )
        if notice != self.notice:
            logger.warning("%s", notice)
        self.notice = notice
