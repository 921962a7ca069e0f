"""Files that only the current user can read, regardless of the umask."""

import os
import tempfile
from pathlib import Path


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file atomically with mode 0600; its directory is created with mode 0700."""
    make_private(path.parent)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def make_private(directory: Path) -> None:
    """Create a directory with mode 0700; an existing directory is unchanged."""
    directory.mkdir(0o700, parents=True, exist_ok=True)
