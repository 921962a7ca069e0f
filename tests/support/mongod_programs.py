"""Programs that begin a mongod otherwise than the store does; `MONGOD_BINARY` names one."""

from pathlib import Path

from agentrl.store.private_mongod import find_mongod

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
"""Where Debian's package `faketime` puts the library that sets a process's clock."""


def mongod_program(folder: Path, *, first: str = "", flags: str = "") -> Path:
    """Write a program that runs shell commands and then becomes mongod, with further flags."""
    program = folder / "mongod"
    # `exec`, so that the process is mongod itself, which ends with its parent.
    program.write_text(f'#!/bin/sh\n{first}\nexec {find_mongod()} "$@" {flags}\n')
    program.chmod(0o755)
    return program


def mongod_with_clock(folder: Path, clock: Path) -> Path:
    """Write a program whose mongod reads what its wall clock is set by from a file."""
    return mongod_program(
        folder,
        first=f"export LD_PRELOAD={FAKETIME} FAKETIME_TIMESTAMP_FILE={clock} "
        "FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_CACHE_DURATION=1",
    )
