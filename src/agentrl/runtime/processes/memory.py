"""The memory of a process: what collects it, what returns it, and who may read it."""

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PR_SET_DUMPABLE = 4
# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Disable garbage collection in the block, and exempt all objects that exist at its end.

    torch and transformers create hundreds of thousands of objects that live as long as the process.
    The collector would scan them dozens of times during the import, and again in every full
    collection, which blocks an event loop for tenths of a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_memory_private() -> None:
    """Prevent other programs of this user from reading this process, and disable core files.

    Children inherit the limit on core files. On Linux, reading memory, environment or open files of
    the process then requires root, even with a debugger. The ranks of a trainer stay readable to one
    another, because GPU libraries share memory through the right to read a process.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))
    if sys.platform == "linux" and os.environ.get("WORLD_SIZE", "1") == "1":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def keep_freed_memory() -> None:
    """Reuse freed memory for the next tensors instead of returning it to the system.

    glibc maps every large tensor anew and unmaps it when it is freed, so that the kernel clears its
    pages for each operation; other C libraries keep their own ways. A step on a CPU frees and allocates the same sizes in every layer. Without this, a third of its
    time went into clearing pages (16,384 tokens, model of 57 million parameters). The resident
    memory of the process stays at its peak.
    """
    mallopt = _from_c_library("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Return freed memory to the system if the allocator keeps it."""
    malloc_trim = _from_c_library("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _from_c_library(function: str) -> Any | None:
    return getattr(ctypes.CDLL(None), function, None)
