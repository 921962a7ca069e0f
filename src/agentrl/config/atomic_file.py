"""Files that are written atomically: complete, or as they were before.

A file is written next to its target under a hidden name, flushed to disk, and renamed, so neither
an error nor a crash leaves a target that is empty or incomplete.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(target: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield an empty file to write, which becomes `target` when the block ends without error."""
    # Random, because processes of several containers may share both a directory and a process id.
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    mode = 0o600 if private else 0o666
    os.close(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield staging
        flush(staging)
        staging.replace(target)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    flush(target.parent)


def write_atomically(target: Path, content: str | bytes, *, private: bool = False) -> None:
    """Create or replace a file; text is encoded as UTF-8. See `atomic_file`."""
    with atomic_file(target, private=private) as staging:
        staging.write_bytes(content.encode() if isinstance(content, str) else content)


def flush(path: Path) -> None:
    """Write a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
