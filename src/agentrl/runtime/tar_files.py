"""Unpacks the plain files of an archive into a new folder.

The contents of an archive are untrusted. Folders follow from the names of files, nothing but regular
files is made, and no file is made twice, so none leads out of the folder.
"""

import shutil
import tarfile
from pathlib import Path, PurePosixPath

_MAX_DEPTH = 32
_MAX_SHOWN = 100
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


def unpack_files(archive: tarfile.TarFile, folder: Path, *, max_files: int, max_bytes: int) -> None:
    """Write the files of an archive to a folder that is empty.

    Args:
        archive: opened for reading.
        folder: exists, and holds nothing.
        max_files: the most members.
        max_bytes: the largest size of all files together.
    """
    num_bytes = 0
    for number, member in enumerate(archive, 1):
        num_bytes += max(member.size, 0)
        if number > max_files:
            raise tarfile.ReadError(f"it holds more than {max_files:,} files")
        if num_bytes > max_bytes:
            raise tarfile.ReadError(f"it holds more than {max_bytes >> 20} MiB")
        name, shown = PurePosixPath(member.name), repr(member.name)[:_MAX_SHOWN]
        if name.is_absolute() or ".." in name.parts or "\0" in member.name:
            raise tarfile.ReadError(f"{shown} is outside of its folder")
        if len(name.parts) > _MAX_DEPTH:
            raise tarfile.ReadError(f"{shown} is deeper than {_MAX_DEPTH} folders")
        if member.isdir():
            continue
        if member.type not in _PLAIN or member.issparse() or member.size < 0:
            raise tarfile.ReadError(f"{shown} is neither a file nor a folder")
        target = folder / name
        content = archive.extractfile(member)
        assert content is not None, "a regular file has a content"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, target.open("xb") as file:
                shutil.copyfileobj(content, file)
        except (FileExistsError, NotADirectoryError):
            raise tarfile.ReadError(f"{shown} occurs twice") from None
