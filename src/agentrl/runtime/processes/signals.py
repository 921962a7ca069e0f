"""How a process of a run ends: gracefully at the first signal, immediately at the second."""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl.runtime.processes.child_processes import kill_descendants

logger = logging.getLogger(__name__)

SAME_SIGNAL_SECONDS = 0.5
"""Signals this close together count as one: supervisors signal a process and its group."""

ORPHAN_SECONDS = 120.0
"""How long a process may take to end in order once its parent is dead, which would have killed it."""

INTERRUPTED = 130
"""Exit status of a process that a signal stopped before its work was done."""
NO_SIGNAL = 3
"""Exit status of a training run that never had a learning signal."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a process in order; not SIGHUP under `nohup`, which ignores it."""
    all_ = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return tuple(one for one in all_ if signal.getsignal(one) is not signal.SIG_IGN)


def stop_on_signals(announcement: str) -> asyncio.Event:
    """Return an event that the first SIGTERM, SIGINT or SIGHUP sets; the second kills the process.

    All processes that it started are killed with it.
    """
    loop = asyncio.get_running_loop()

    def end_at_once(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        kill_descendants()
        # The default action: after Python's own handler of SIGINT, the event loop would shut down
        # gracefully.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    stop = asyncio.Event()
    _handle_signals(announcement, stop, end_at_once)
    return stop


@contextmanager
def signal_events(announcement: str, stop: asyncio.Event, at_once: asyncio.Event) -> Iterator[None]:
    """Let the first SIGTERM, SIGINT or SIGHUP set `stop` and the second `at_once`, while the context lasts."""
    _handle_signals(announcement, stop, lambda number: at_once.set())
    try:
        yield
    finally:
        for number in stop_signals():
            asyncio.get_running_loop().remove_signal_handler(number)


def _handle_signals(
    announcement: str, stop: asyncio.Event, at_second: Callable[[signal.Signals], None]
) -> None:
    stopped_at = 0.0
    parent = os.getppid()

    def on_signal(number: signal.Signals) -> None:
        nonlocal stopped_at
        if not stop.is_set():
            logger.warning("%s: %s; a second signal exits immediately", number.name, announcement)
            stopped_at = time.monotonic()
            stop.set()
            _kill_orphan_later(parent, ORPHAN_SECONDS)
        elif time.monotonic() - stopped_at >= SAME_SIGNAL_SECONDS:
            at_second(number)

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


def _kill_orphan_later(parent: int, seconds: float) -> None:
    """If the parent is dead by then, kill this process and all that it started, even if it hangs.

    The kernel announces a parent's death when the first of its threads has ended, so that a parent of
    many threads may still seem to live when the signal is handled.
    """

    def kill() -> None:
        if os.getppid() == parent:
            return
        kill_descendants()
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()


async def stopped_within(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for `seconds`, or until `stop` is set; return whether it is."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True
