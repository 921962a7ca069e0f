"""A process that may hardly allocate memory."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def little_memory(num_bytes: int) -> Iterator[None]:
    """Let this process allocate at most so much more address space, while the context lasts."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    present = num_pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
