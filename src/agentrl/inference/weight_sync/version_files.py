"""Published versions on disk: names, sizes, checksums, and retention."""

import hashlib
import re
import secrets
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

_VERSION_DIR = re.compile(r"^\d{6,}$")
_ADAPTER_NAME = re.compile(r"^(?P<run>.+)-[0-9a-f]{6}-v\d+$")
_CHUNK_BYTES = 1 << 20


def version_dir(root: Path, version: int) -> Path:
    """Return the directory of a policy version below `root`."""
    return root / f"{version:06d}"


def weight_bytes(directory: Path) -> int:
    """Return the total size of a directory's weight files in bytes."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def checksum(directory: Path) -> str:
    """Return the SHA-256 over a directory's weight files in name order, as hex digits."""
    return checksum_of(sorted(directory.glob("*.safetensors")))


def checksum_of(paths: Iterable[Path]) -> str:
    """Return the SHA-256 over these files, one after the other, as hex digits."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def remove_old_versions(root: Path, *, keep: int, in_use: Collection[int]) -> list[int]:
    """Remove published versions that are no longer needed; return their numbers."""
    versions = sorted(
        int(path.name) for path in root.iterdir() if _VERSION_DIR.match(path.name) and path.is_dir()
    )
    removed = [version for version in versions[: -max(keep, 1)] if version not in in_use]
    for version in removed:
        shutil.rmtree(version_dir(root, version), ignore_errors=True)
    return removed


class AdapterNames:
    """Names of the adapters that one trainer process publishes: `RUN-1a2b3c-v12`.

    The hexadecimal part is drawn when the trainer starts. A trainer that resumes publishes version
    numbers again, which servers may know from steps that were lost; the new names keep a server
    from answering with the old weights.
    """

    def __init__(self, run_name: str) -> None:
        self._prefix = f"{run_name}-{secrets.token_hex(3)}"

    def of(self, version: int) -> str:
        """Return the name of a policy version's adapter."""
        return f"{self._prefix}-v{version}"


def is_of_same_run(name: str, other: str) -> bool:
    """Return whether two adapter names belong to one run, whichever trainer process chose them."""
    match, other_match = _ADAPTER_NAME.match(name), _ADAPTER_NAME.match(other)
    return match is not None and other_match is not None and match["run"] == other_match["run"]
