"""Fails an async test in which AgentRL's code keeps the event loop for longer than it may.

Counted is the processor time of the loop's own thread in one callback, without that of the garbage
collector: a machine that is busy with other things makes no difference. A signal, sent as processor
time passes, looks at the stack once the callback has taken too long; where the test itself or an
import is at work, nothing is held against the code.
"""

import asyncio
import gc
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

STALL_SECONDS = 0.25
_LOOK_SECONDS = 0.05
_TESTS = str(Path(__file__).parents[2] / "tests")
_SOURCE = str(Path(__file__).parents[2] / "src" / "agentrl")
_HANDLE: Any = asyncio.Handle
_run = _HANDLE._run


class LoopWatchdog:
    """Watches the loop of the main thread."""

    def __init__(self) -> None:
        self.stalls: list[str] = []
        self.longest_seconds = 0.0
        """The most that one callback took, also where that was no stall."""
        self._began: float | None = None
        self._handle: Any = None
        self._collecting: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the context ends."""

        def run(handle: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                _run(handle)  # of a loop that a thread runs for itself
                return
            self._began, self._handle = time.thread_time(), handle
            try:
                _run(handle)
            finally:
                if self._began is not None:
                    taken = time.thread_time() - self._began
                    self.longest_seconds = max(self.longest_seconds, taken)
                self._began = self._handle = None

        before = signal.signal(signal.SIGPROF, self._look)
        signal.siginterrupt(signal.SIGPROF, False)  # calls of the kernel go on by themselves
        gc.callbacks.append(self._exempt)
        _HANDLE._run = run
        signal.setitimer(signal.ITIMER_PROF, _LOOK_SECONDS, _LOOK_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            _HANDLE._run = _run
            gc.callbacks.remove(self._exempt)
            signal.signal(signal.SIGPROF, before)

    def _look(self, _number: int, frame: FrameType | None) -> None:
        if self._began is None or frame is None or self._collecting is not None:
            return
        stack = traceback.extract_stack(frame)
        watched = [at for at, one in enumerate(stack) if one.filename == __file__]
        if not watched:  # the process ends in the middle of a callback
            return
        callback = stack[watched[-1] + 1 :]
        places = [one.filename for one in callback]
        own = [place for place in places if place.startswith((_TESTS, _SOURCE))]
        # The signal comes late after a long call of C: with no frame of ours, it was not ours.
        is_ours = bool(own) and own[-1].startswith(_SOURCE)
        if not is_ours or any("importlib" in place for place in places):
            self._began = time.thread_time()
            return
        taken = time.thread_time() - self._began
        if taken > STALL_SECONDS:
            self.longest_seconds = max(self.longest_seconds, taken)
            lines = "".join(traceback.format_list(callback))
            self.stalls.append(
                f"{self._handle!r:.300} kept the event loop for {taken:.2f} s of processor time:\n{lines}"
            )
            self._began = None

    def _exempt(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        elif self._collecting is not None and self._began is not None:
            self._began += time.thread_time() - self._collecting
            self._collecting = None
