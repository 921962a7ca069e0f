"""How a process of a run ends: in order at the first signal, at once at the second."""

import asyncio
import logging
import os
import signal
import time

logger = logging.getLogger(__name__)

SAME_SIGNAL_SECONDS = 0.5
"""Signals this close together are one: supervisors signal a process and its group."""

INTERRUPTED = 130
"""Exit status of a process that a signal ended before its work was done."""


def stop_on_signals(what_follows: str) -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; the second ends the process at once.

    Args:
        what_follows: what is said to the user at the first.
    """
    stop = asyncio.Event()
    stopped_at = 0.0
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        nonlocal stopped_at
        if not stop.is_set():
            logger.warning("%s: %s; another one ends it at once", number.name, what_follows)
            stopped_at = time.monotonic()
            stop.set()
        elif time.monotonic() - stopped_at >= SAME_SIGNAL_SECONDS:
            loop.remove_signal_handler(number)
            # Not Python's own answer to SIGINT, which an event loop would try to end in order.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
