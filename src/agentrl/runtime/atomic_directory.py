"""Directories that are written atomically: complete and durable, or absent.

A directory is filled next to its target under a hidden name, flushed to disk, and renamed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.config.atomic_file import flush
from agentrl.errors import WriteError


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `target` when the block ends without error.

    An existing `target` is replaced.
    """
    staging = stage_directory(target)
    try:
        yield staging
        commit_directory(staging, target)
    except OSError as error:
        raise _cannot_write(target, error) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def stage_directory(target: Path) -> Path:
    """Return an empty directory to fill, which `commit_directory` moves to `target`.

    For directories that several functions or processes fill; use `atomic_directory` otherwise.
    """
    staging = _sibling(target, "tmp")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        raise _cannot_write(target, error) from error
    return staging


def commit_directory(staging: Path, target: Path) -> None:
    """Make a directory durable and move it to `target`.

    An existing `target` is replaced, and stays until the new directory is complete.
    """
    outgoing = _sibling(target, "old")
    try:
        _flush_tree(staging)
        if target.exists():
            shutil.rmtree(outgoing, ignore_errors=True)
            target.rename(outgoing)
        staging.rename(target)
        flush(target.parent)
        shutil.rmtree(outgoing, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        if outgoing.exists() and not target.exists():
            outgoing.rename(target)
        raise _cannot_write(target, error) from error


def clear_leftovers(root: Path) -> None:
    """Remove what killed processes left of unfinished directories below `root`.

    A directory that was moved aside for a successor that never came is moved back.
    """
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        parts = path.name.split(".")
        if len(parts) != 4 or parts[0] or parts[3] not in ("tmp", "old"):
            continue
        target = root / parts[1]
        if parts[3] == "old" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _sibling(target: Path, ending: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{ending}")


def _cannot_write(target: Path, error: OSError) -> WriteError:
    return WriteError(f"cannot write {target}: {error.strerror or error}")


def _flush_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)
