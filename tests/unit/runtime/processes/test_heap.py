"""A process keeps the memory that it frees, and returns it when told to."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")

_PROGRAM = """
import resource, sys
import psutil, torch
from agentrl.runtime.processes.heap import keep_freed_memory, return_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def allocate():
    for _ in range(20):
        torch.ones(16, 2**20)  # 64 MiB

allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = psutil.Process().memory_info().rss
return_freed_memory()
print(faults, kept - psutil.Process().memory_info().rss)
"""


def figures(mode: str) -> tuple[int, int]:
    """Return page faults of 20 tensors of 64 MiB, and the bytes that went back at the end."""
    words = [sys.executable, "-c", _PROGRAM, mode]
    output = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout
    faults, returned = map(int, output.split())
    return faults, returned


def test_freed_memory_is_reused_until_it_is_returned() -> None:
    faults, returned = figures("keep")
    assert faults < 1000  # 64 MiB are 16,384 pages
    assert returned > 60 * 2**20


def test_glibc_by_itself_maps_every_large_tensor_anew() -> None:
    faults, _ = figures("leave")
    assert faults > 100_000
