"""The memory of a group of processes: their own, and that of files which exist in memory alone."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_SHARED = "/dev/shm"
_NAMES = ("/memfd:", f"{_SHARED}/")
"""How the open files begin that are memory."""


def memory_of(pids: Sequence[int]) -> int:
    """Return the bytes of memory that these processes and their descendants use.

    Files in memory (`memfd_create`, a `/dev/shm` of their own, deleted files there) belong to no
    process unless it maps them, so they are added to the processes' resident memory.
    """
    resident, mapped = 0, 0
    files: dict[tuple[int, int], int] = {}
    for process in _with_descendants(pids):
        with contextlib.suppress(psutil.Error, OSError):
            resident += process.memory_info().rss
            mapped += _mapped_bytes(process.pid)
            files.update(_open_files(process.pid))
            files.update(_own_shared_memory(process.pid))
    return resident + max(0, sum(files.values()) - mapped)


def _with_descendants(pids: Sequence[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(pid)
            yield parent
            yield from parent.children(recursive=True)


def _mapped_bytes(pid: int) -> int:
    """Return the part of the resident memory that is pages of such files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    return 0


def _open_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the sizes of the process's open files in memory that no directory shows."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            name, status = os.readlink(link), link.stat()
            # Other files of a shared directory are counted with it, or are of other processes.
            if name.startswith(_NAMES) and status.st_nlink == 0:
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def _own_shared_memory(pid: int) -> dict[tuple[int, int], int]:
    """Return the size of the files in a confined process's own `/dev/shm`, by its device."""
    path = f"/proc/{pid}/root{_SHARED}"
    device = os.stat(path).st_dev
    if device == os.stat(_SHARED).st_dev:
        return {}
    names = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    found = {}
    for name in names:
        with contextlib.suppress(OSError):
            status = name.lstat()
            found[device, status.st_ino] = status.st_blocks * 512
    return found
