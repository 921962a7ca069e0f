"""Another program of the same user beside a command that holds secrets."""

import os
import subprocess
import sys

import pytest

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
