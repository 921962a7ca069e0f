"""Programs that begin a mongod otherwise than the store does; `MONGOD_BINARY` names one."""

from pathlib import Path

from agentrl.store.private_mongod import find_mongod


def mongod_program(folder: Path, *, first: str = "", flags: str = "") -> Path:
    """Write a program that runs shell commands and then becomes mongod, with further flags."""
    program = folder / "mongod"
    # `exec`, so that the process is mongod itself, which ends with its parent.
    program.write_text(f'#!/bin/sh\n{first}\nexec {find_mongod()} "$@" {flags}\n')
    program.chmod(0o755)
    return program
