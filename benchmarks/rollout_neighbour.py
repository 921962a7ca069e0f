"""Unrelated work alongside the engine, with the same load as the sampler's side.

Two cores of a machine share more than memory: on many, especially virtual ones, they are two
threads of one core, and load on one slows down the other. In production, samplers and engines do
not share a core. Direct requests next to an equally busy neighbor separate the sampler's own cost
from the machine's.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BUSY = """
import os, sys, time
os.nice(19)  # whoever asks the engine goes first
share, period = float(sys.argv[1]), 0.01
numbers = list(range(1000))
while True:
    end = time.process_time() + share * period
    while time.process_time() < end:
        sum(numbers)
    time.sleep((1 - share) * period)
"""


@contextmanager
def busy(share: float) -> Iterator[None]:
    """Keep one of this process's cores busy for this share of the time, at most 1."""
    process = subprocess.Popen([sys.executable, "-c", _BUSY, str(min(share, 1.0))])
    try:
        yield
    finally:
        process.kill()
        process.wait()
