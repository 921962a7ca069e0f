"""Files that only the current user can read, regardless of the umask."""

from pathlib import Path

from agentrl.config.atomic_file import write_atomically


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file atomically with mode 0600; its directory is created with mode 0700."""
    make_private(path.parent)
    write_atomically(path, content, private=True)


def make_private(directory: Path) -> None:
    """Create a directory with mode 0700; an existing directory is unchanged."""
    directory.mkdir(0o700, parents=True, exist_ok=True)
