"""Protects a process's memory and environment from other programs of the same user."""

import ctypes
import os
import resource
import sys

_PR_SET_DUMPABLE = 4


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
