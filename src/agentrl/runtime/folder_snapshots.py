"""Copies of folders as bytes: what a sandbox or a tool server leaves in its files.

Equal folders give equal bytes, so that a store keeps them once. The files belong to untrusted
programs, which may still run: links are kept as links and never followed.
"""

import io
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_SNAPSHOT_BYTES = 8 * 2**20
"""Largest sum of the files of a snapshot."""
_MAX_FILES = 10_000
_MAX_PACKED_BYTES = 4 * MAX_SNAPSHOT_BYTES
"""Of the files with their names and paddings, uncompressed."""


def pack_folders(folders: Mapping[str, Path]) -> bytes | None:
    """Return the content of folders, each under its name.

    Returns:
        None if it is too large, cannot be read, or changes meanwhile.
    """
    packed, room = io.BytesIO(), MAX_SNAPSHOT_BYTES
    try:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for number, (info, data) in enumerate(_entries(folders)):
                room -= info.size
                if room < 0 or number > _MAX_FILES:
                    return None
                archive.addfile(info, None if data is None else io.BytesIO(data))
    except (OSError, ValueError):
        return None
    if packed.tell() > _MAX_PACKED_BYTES:
        return None
    return zlib.compress(packed.getvalue(), 1)


def unpack_folders(packed: bytes, folders: Mapping[str, Path]) -> None:
    """Replace the content of folders by what `pack_folders` read under their names.

    Raises:
        ValueError: no `pack_folders` makes such bytes.
    """
    unzip = zlib.decompressobj()
    content = unzip.decompress(packed, _MAX_PACKED_BYTES)
    if not unzip.eof:
        raise ValueError("the snapshot is incomplete, or larger than any that is made")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for name, folder in folders.items():
            _empty(folder)
            members = []
            for member in archive.getmembers():
                first, _, rest = member.name.partition("/")
                if first == name and rest:
                    members.append(member.replace(name=rest, deep=False))
            archive.extractall(folder, members, filter="tar")


def _entries(folders: Mapping[str, Path]) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Yield the entries of an archive in a fixed order, folders before what they hold."""
    for name, folder in folders.items():
        for path, subfolders, files, handle in os.fwalk(folder, onerror=_raise):
            subfolders.sort()
            inside = os.path.join(name, os.path.relpath(path, folder))
            for entry in (*subfolders, *sorted(files)):
                found = _entry(os.path.normpath(os.path.join(inside, entry)), entry, handle)
                if found is not None:
                    yield found


def _entry(name: str, entry: str, handle: int) -> tuple[tarfile.TarInfo, bytes | None] | None:
    """Return an entry of an open folder; None for what is no file, folder or link."""
    status = os.lstat(entry, dir_fd=handle)
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        return info, None
    if stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry, dir_fd=handle)
        return info, None
    if not stat.S_ISREG(status.st_mode):
        return None
    if status.st_size > MAX_SNAPSHOT_BYTES:
        raise OSError(f"{name} is too large")
    # A program may have put a link or a pipe in its place by now.
    opened = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
    with os.fdopen(opened, "rb") as file:
        data = file.read(MAX_SNAPSHOT_BYTES + 1)
    info.size = len(data)
    return info, data


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _raise(error: OSError) -> None:
    raise error
