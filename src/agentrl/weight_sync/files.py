"""Published weights as directories: whole or absent, never half written."""

import hashlib
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from agentrl.errors import PublishError

_VERSION_DIR = re.compile(r"^\d{6,}$")
_CHUNK_BYTES = 1 << 20


def version_dir(root: Path, version: int) -> Path:
    """Return the directory of a policy version below `root`."""
    return root / f"{version:06d}"


def stage(target: Path) -> Path:
    """Return an empty directory in which to write what `put_in_place` moves to `target`.

    Raises:
        PublishError: it could not be made.
    """
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        raise PublishError(f"cannot write {target}: {error.strerror or error}") from error
    return staging


def put_in_place(staging: Path, target: Path) -> Path:
    """Make a directory durable and move it to `target`.

    A directory that stood at `target` before is replaced, and is there until the new one is whole.

    Raises:
        PublishError: it could not be moved; what stood at `target` is still there.
    """
    outgoing = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        _sync_tree(staging)
        if target.exists():
            shutil.rmtree(outgoing, ignore_errors=True)
            target.rename(outgoing)
        staging.rename(target)
        _sync_path(target.parent)
        shutil.rmtree(outgoing, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        if outgoing.exists() and not target.exists():
            outgoing.rename(target)
        raise PublishError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def clear_leftovers(root: Path) -> None:
    """Remove what a crash between `stage` and the end of `put_in_place` left below `root`.

    A replaced directory whose successor never arrived is moved back to its place.
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


def weight_bytes(directory: Path) -> int:
    """Return the bytes of a directory's weight files in all."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def checksum(directory: Path) -> str:
    """Return the SHA-256 over a directory's weight files in name order."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def remove_old_versions(root: Path, *, keep: int, in_use: Collection[int]) -> list[int]:
    """Remove published versions that nobody needs and return their numbers.

    Args:
        root: directory of the version directories.
        keep: how many of the newest versions stay in any case; at least 1.
        in_use: versions that stay however old they are.
    """
    found = sorted(
        int(path.name) for path in root.iterdir() if _VERSION_DIR.match(path.name) and path.is_dir()
    )
    removed = [version for version in found[: -max(keep, 1)] if version not in in_use]
    for version in removed:
        shutil.rmtree(version_dir(root, version), ignore_errors=True)
    return removed


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync_path(path)
    _sync_path(directory)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
