"""Packs or unpacks folders: `python -I -S snapshot_child.py pack|unpack BYTES NAME=FOLDER...`.

Packing writes the bytes to standard output; unpacking reads them from standard input. Links are kept
as links. This module imports nothing of AgentRL, so that it starts quickly.
"""

import io
import os
import shutil
import stat
import sys
import tarfile
import zlib
from collections.abc import Iterator

_MAX_FILES = 10_000


def main(action: str, most: int, folders: dict[str, str]) -> None:
    """Do what the command line says; an exception is a refusal."""
    if action == "pack":
        sys.stdout.buffer.write(_packed(folders, most))
    else:
        _unpack(sys.stdin.buffer.read(), folders, most)


def _packed(folders: dict[str, str], most: int) -> bytes:
    packed, room = io.BytesIO(), most
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number, (info, data) in enumerate(_entries(folders, most)):
            room -= info.size
            if room < 0 or number > _MAX_FILES or packed.tell() > 4 * most:
                raise ValueError("the folders are too large")
            archive.addfile(info, io.BytesIO(data))
    return zlib.compress(packed.getvalue(), 1)


def _entries(folders: dict[str, str], most: int) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the entries of an archive in a fixed order, folders before what they hold."""
    waiting = [*folders.items()][::-1]
    while waiting:
        above, folder = waiting.pop()
        inner = []
        for entry in sorted(os.scandir(folder), key=lambda one: one.name):
            status, name = entry.stat(follow_symlinks=False), f"{above}/{entry.name}"
            info, data = tarfile.TarInfo(name), b""
            info.mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISDIR(status.st_mode):
                info.type = tarfile.DIRTYPE
                inner.append((name, entry.path))
            elif stat.S_ISLNK(status.st_mode):
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
            elif stat.S_ISREG(status.st_mode):
                with open(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                    data = file.read(most + 1)
                info.size, info.mtime = len(data), int(status.st_mtime)
            else:
                continue
            yield info, data
        waiting += inner[::-1]


def _unpack(packed: bytes, folders: dict[str, str], most: int) -> None:
    unzip = zlib.decompressobj()
    content = unzip.decompress(packed, 4 * most)
    if not unzip.eof:
        raise ValueError("it is incomplete, or larger than any that is made")
    for folder in folders.values():
        for entry in os.scandir(folder):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
    made, modes = dict(folders), []
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            above, _, name = member.name.rpartition("/")
            # A folder that was unpacked, and no link in its place.
            if above not in made or name in ("", ".", ".."):
                raise ValueError(f"{member.name!r} lies in no folder of the snapshot")
            path = f"{made[above]}/{name}"
            if member.isdir():
                os.mkdir(path)
                made[member.name] = path
                modes.append((path, member.mode))
            elif member.issym():
                os.symlink(member.linkname, path)
            elif member.isreg():
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with open(os.open(path, flags, member.mode), "wb") as file:
                    file.write(archive.extractfile(member).read())  # type: ignore[union-attr]
                os.utime(path, (member.mtime, member.mtime))
            else:
                raise ValueError(f"{member.name!r} is no file, folder or link")
    for path, mode in reversed(modes):  # a folder that may not be written to is filled first
        os.chmod(path, mode)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), dict(one.split("=", 1) for one in sys.argv[3:]))
