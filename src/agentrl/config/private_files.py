"""Files that only the current user can read, regardless of the umask."""

import os
import tempfile
from pathlib import Path


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file atomically with mode 0600; its directory is created with mode 0700."""
    make_private(path.parent)
    descriptor, staged = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(staged, path)
    except BaseException:
        os.unlink(staged)
        raise


def make_private(directory: Path) -> None:
    """Make a directory with mode 0700. One that exists stays as its owner made it."""
    directory.mkdir(0o700, parents=True, exist_ok=True)
