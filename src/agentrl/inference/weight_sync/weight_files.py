"""Directories of published weights: their names, sizes and checksums, and which of them stay."""

import hashlib
import re
import shutil
from collections.abc import Collection
from pathlib import Path

_VERSION_DIR = re.compile(r"^\d{6,}$")
_CHUNK_BYTES = 1 << 20


def version_dir(root: Path, version: int) -> Path:
    """Return the directory of a policy version below `root`."""
    return root / f"{version:06d}"


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
