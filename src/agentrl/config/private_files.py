"""Files that only the current user can read, regardless of the umask."""

import contextlib
import os
import secrets
from pathlib import Path

from agentrl.config.atomic_file import write_atomically


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file atomically with mode 0600; its directory is created with mode 0700."""
    make_private(path.parent)
    write_atomically(path, content, private=True)


def kept_key(path: Path) -> str:
    """Return the key in a private file, which the first call makes.

    Processes that call it at the same time get the same key.
    """
    if not path.exists():
        made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        write_private(made, secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
        made.unlink()
    return path.read_text(encoding="utf-8").strip()


def make_private(directory: Path) -> None:
    """Create a directory with mode 0700; an existing directory is unchanged."""
    directory.mkdir(0o700, parents=True, exist_ok=True)
