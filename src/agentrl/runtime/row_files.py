"""Files that rows name: those below the folder of their question file, and no others.

Rows are untrusted, and the content of a file that they name reaches the model, its tools and the database. So
links are resolved before the place of a file is compared, and the file is then opened without following
any. The hub's cache alone keeps the files of a folder elsewhere: `snapshots/REVISION/FILE` is a
link to `blobs/HASH` of the same repository.
"""

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from agentrl.errors import DatasetError

_HUB_REPOSITORY = re.compile(r"(?:datasets|models|spaces)--.+")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ADVICE = "put it beside the questions, or leave the row out"


def open_row_file(folder: Path | None, name: str) -> BinaryIO:
    """Open the regular file that a row names, relative to the folder of its question file, if any."""
    if folder is None:
        raise DatasetError(
            "only the rows of a file or a folder name files; give addresses or bytes"
        )
    if _URL.match(name):
        raise DatasetError(f"neither an http(s) or data: URL nor a file; {_ADVICE}")
    try:
        root = folder.resolve(strict=True)
        target = (root / name).resolve(strict=True)
        if target.is_relative_to(root):
            return _open_below(root, target.relative_to(root))
        blobs, named_in = _hub_blobs(root), (root / name).parent.resolve(strict=True)
        if blobs is not None and target.parent == blobs and named_in.is_relative_to(root):
            return _open_below(blobs, Path(target.name))
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links is a RuntimeError
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DatasetError(f"{reason}; {_ADVICE}") from None
    raise DatasetError(f"leads out of {folder}, and rows name files of that folder only; {_ADVICE}")


def _hub_blobs(root: Path) -> Path | None:
    """Return where the hub's cache keeps the files of a folder, if it is one of a snapshot."""
    for snapshots in root.parents:
        repository = snapshots.parent
        if snapshots.name == "snapshots" and _HUB_REPOSITORY.fullmatch(repository.name):
            return repository / "blobs"
    return None


def _open_below(root: Path, relative: Path) -> BinaryIO:
    """Open a file by its resolved path; whoever puts a link there meanwhile gets an error."""
    place = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for part in relative.parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        # Opening a pipe would otherwise wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        if not stat.S_ISREG(os.lstat(relative.name, dir_fd=place).st_mode):
            raise ValueError("not a file")
        file = os.fdopen(os.open(relative.name, flags, dir_fd=place), "rb")
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("not a file")
    return file
