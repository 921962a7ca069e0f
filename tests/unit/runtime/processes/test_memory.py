"""Another program of the same user beside a command that holds secrets."""

import gc
import os
import platform
import subprocess
import sys

import pytest

from agentrl.runtime.processes.memory import frozen_imports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

NOBODY = 65534
# Root may read everything, so that it is a plain user who holds a secret, and who tries to read it.
PROGRAM = f"""
import ctypes, os, resource, sys
from agentrl.cli.main import main
main(["version"])  # another user may not read what it imports
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
ctypes.CDLL(None).prctl(4, 1)  # as any program begins
resource.setrlimit(resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)[1:] * 2)
if sys.argv[1] == "command":
    main(["version"])
sys.stdout.flush()
reader = os.fork()
if reader == 0:
    for name in ("environ", "mem", "maps"):
        try:
            os.close(os.open(f"/proc/{{os.getppid()}}/{{name}}", os.O_RDONLY))
        except PermissionError:
            continue
        print("read", name, flush=True)
    os._exit(0)
os.waitpid(reader, 0)
print("core files", resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


def said(kind: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind],
        env={**os.environ, "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_no_other_program_of_the_user_reads_a_command() -> None:
    assert [line for line in said("plain") if line.startswith("read")] == [
        *("read environ", "read mem", "read maps")
    ]
    *_, last = found = said("command")
    assert [line for line in found if line.startswith("read")] == []
    assert last == "core files 0"


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")

_PROGRAM = """
import resource, sys
import psutil, torch
from agentrl.runtime.processes.memory import keep_freed_memory, return_freed_memory

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


def test_what_a_block_imports_is_collected_neither_within_it_nor_later() -> None:
    before = gc.get_freeze_count()
    with frozen_imports():
        assert not gc.isenabled()
        made = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)
