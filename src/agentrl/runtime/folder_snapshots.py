"""Copies of folders as bytes: what a sandbox or a tool server leaves in its files.

Equal folders give equal bytes, so that a store keeps them once. The files belong to untrusted
programs, which may still run: `snapshot_child` reads and writes them behind a wall that shows it these
folders alone.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from agentrl.runtime.processes.wall import Wall

MAX_SNAPSHOT_BYTES = 8 * 2**20
"""Largest sum of the files of a snapshot."""
_PROGRAM = Path(__file__).with_name("snapshot_child.py")
_SECONDS = 60.0


def pack_folders(folders: Mapping[str, Path]) -> bytes | None:
    """Return the content of folders, each under its name.

    Returns:
        None if it is too large, cannot be read, or changes meanwhile.
    """
    done = _run("pack", folders, b"")
    return done.stdout if done.returncode == 0 else None


def unpack_folders(packed: bytes, folders: Mapping[str, Path]) -> None:
    """Replace the content of folders by what `pack_folders` read under their names."""
    done = _run("unpack", folders, packed)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ValueError(f"the snapshot cannot be unpacked: {''.join(last)}")


def _run(
    action: str, folders: Mapping[str, Path], given: bytes
) -> "subprocess.CompletedProcess[bytes]":
    real = {name: os.path.realpath(folder) for name, folder in folders.items()}
    # An unpacked folder may be larger than its files: names and paddings count, too.
    wall = Wall(
        writable=tuple(map(Path, real.values())),
        network=False,
        memory_bytes=64 * MAX_SNAPSHOT_BYTES,
        disk_bytes=4 * MAX_SNAPSHOT_BYTES,
    )
    named = (f"{name}={folder}" for name, folder in real.items())
    argv = [sys.executable, "-I", "-S", str(_PROGRAM), action, str(MAX_SNAPSHOT_BYTES), *named]
    try:
        return subprocess.run(
            wall.command(argv),
            input=given,
            capture_output=True,
            env={"PATH": os.defpath},
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 1, b"", b"it took too long")
