"""The data folder of a private mongod: the process that serves it, its port and its secrets.

One process at a time serves the data; it holds a lock file in the folder, which the kernel releases
when it exits. The folder also holds what a mongod needs at its next start, in files that only the
owner can read.
"""

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from agentrl.errors import DataInUse

DEFAULT_PORT = 27417
CLAIM_SECONDS = 3.0
"""How long a start waits for a process that currently serves the data; readers release it soon."""
_POLL_SECONDS = 0.02
_MAX_HOLDER_BYTES = 4096


def running_port(data_dir: Path) -> int | None:
    """Return the port that currently serves the data, if any; its mongod may still be starting."""
    return last_port(data_dir) or None if serving(data_dir) is not None else None


def last_port(data_dir: Path) -> int:
    """Return the port that these data were served from last, 0 before the first time."""
    try:
        return int(json.loads(state_file(data_dir).read_text(encoding="utf-8"))["port"])
    except (FileNotFoundError, ValueError):
        return 0


def wanted_port(data_dir: Path, given: int | None) -> int:
    """Return the port to serve these data from: the given one, else the last, else the default."""
    return (last_port(data_dir) or DEFAULT_PORT) if given is None else given


def serving(data_dir: Path) -> str | None:
    """Return a description of the process that serves `data_dir`; None if none does."""
    try:
        lock = os.open(_lock_file(data_dir), os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        # A shared lock, so that processes that only look do not block each other.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(lock, _MAX_HOLDER_BYTES, 0).decode() or "a process that is starting"
    else:
        return None
    finally:
        os.close(lock)


def acquire_lock(data_dir: Path) -> int:
    """Return the open lock that gives this process exclusive use of `data_dir`.

    The kernel releases it when the process ends, even after a kill.
    """
    deadline = time.monotonic() + CLAIM_SECONDS
    lock = os.open(_lock_file(data_dir), os.O_RDWR | os.O_CREAT, 0o600)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(lock, _MAX_HOLDER_BYTES, 0).decode()
                os.close(lock)
                raise DataInUse(f"{data_dir} is in use by {holder}", holder) from None
            time.sleep(_POLL_SECONDS)
    command = " ".join([Path(sys.argv[0]).name.replace("__main__.py", "agentrl"), *sys.argv[1:2]])
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    holder = f"`{command}` on {socket.gethostname()}, process {os.getpid()}, since {now}"
    os.ftruncate(lock, 0)
    os.pwrite(lock, holder.encode(), 0)
    return lock


@contextmanager
def joined_data(data_dir: Path) -> Iterator[None]:
    """Be counted by `is_joined`, as one who reads data that another process serves."""
    with _joiners_file(data_dir).open("a") as joiners:
        fcntl.flock(joiners, fcntl.LOCK_SH)
        yield


def is_joined(data_dir: Path) -> bool:
    """Return whether a process is within `joined_data`."""
    with _joiners_file(data_dir).open("a") as joiners:
        try:
            fcntl.flock(joiners, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _joiners_file(data_dir: Path) -> Path:
    return data_dir / "agentrl-joined"


def _lock_file(data_dir: Path) -> Path:
    return data_dir / "agentrl-lock"


def state_file(data_dir: Path) -> Path:
    """Return the file with the process that serves the data, and its port."""
    return data_dir / "agentrl-mongod.json"


def key_file(data_dir: Path) -> Path:
    """Return the key file with which the mongod authenticates to itself."""
    return data_dir / "agentrl-key"


def password_file(data_dir: Path) -> Path:
    """Return the file with the password of the login that reads and writes."""
    return data_dir / "agentrl-password"


def reader_password_file(data_dir: Path) -> Path:
    """Return the file with the password of the login that only reads."""
    return data_dir / "agentrl-reader-password"
