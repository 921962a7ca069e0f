"""A process that may hardly allocate memory."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_BLOCK_BYTES = 1 << 20


@contextmanager
def little_memory(num_bytes: int) -> Iterator[None]:
    """Let this process allocate at most so much more address space, while the context lasts.

    Freed memory that the allocator keeps, as that of earlier tests, is taken first.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken, present = [], _address_space()
    while _address_space() == present:
        taken.append(torch.empty(_BLOCK_BYTES, dtype=torch.uint8))
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        taken.clear()


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
