"""Detects a full disk, which causes many different errors, and reports it uniformly."""

import shutil
from pathlib import Path

MIN_FREE_BYTES = 64 << 20
"""Less free space counts as a full disk: a private mongod alone writes journals of 20 MB."""


def full_disk(path: Path) -> str | None:
    """Return a message that the disk of a path is full, or None if it is not."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free >= MIN_FREE_BYTES:
        return None
    return f"the disk of {path} is full ({free / 2**20:.0f} MB are left)"
