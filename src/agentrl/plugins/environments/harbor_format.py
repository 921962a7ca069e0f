"""Parses tasks in Harbor's format from untrusted files.

Input: a folder, and the root that it must not point outside. Output: values of bounded size, or a
one-line `ConfigError` that names the file. Nothing is run or copied here.
"""

import hashlib
import math
import os
import posixpath
import re
import shlex
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from agentrl.errors import ConfigError

_MAX_TEXT_BYTES = 1 << 20
_MAX_CONTEXT_BYTES = 8 << 30
_MAX_CONTEXT_ENTRIES = 100_000
_CHUNK_BYTES = 1 << 20
_MAX_CHARS = 1000
_MAX_MEGABYTES = 1 << 20
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", re.IGNORECASE)
_UNITS = {"": 1 / 2**20, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_INSTRUCTION = re.compile(r"^\s*(\w+)\s+(.*)$")
_SUPPORTED_INSTRUCTIONS = frozenset(
    {"FROM", "WORKDIR", "COPY", "ENV", "CMD", "ENTRYPOINT", "LABEL"}
)
"""Instructions that `runtime=process` carries out itself or can ignore."""


def read_text(path: Path, root: Path) -> str:
    """Return a file's text."""
    check_own(path, root)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_TEXT_BYTES + 1)
        if len(content) > _MAX_TEXT_BYTES:
            raise ConfigError(f"{path}: it is larger than {_MAX_TEXT_BYTES >> 20} MiB")
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: it is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def check_own(path: Path, root: Path) -> None:
    """Refuse a file or folder that points outside the root, or contains one that does.

    Copying follows links: a link to one of this user's keys would give it to the commands of a
    policy.
    """
    paths = [path]
    for folder, folders, files in os.walk(path):
        paths += [Path(folder, name) for name in (*folders, *files)]
    for one in paths:
        try:
            target = one.resolve(strict=True)
            mode = target.stat().st_mode
        except (OSError, RuntimeError) as error:  # missing, or a cycle of links
            raise ConfigError(f"{one}: {getattr(error, 'strerror', error)}") from None
        if not target.is_relative_to(root.resolve()):
            raise ConfigError(f"{one}: it points outside {root}")
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(f"{one}: it is not a file")


def content_hash(folder: Path) -> str:
    """Return a hash of a folder's content: names, kinds, modes, bytes and targets of links.

    The same content has the same hash in every folder, whatever its times and owners. Links are not
    followed: Docker copies them as links.
    """
    digest = hashlib.blake2b(digest_size=16)
    num_bytes = 0
    for number, (path, mode) in enumerate(_entries(folder)):
        if number >= _MAX_CONTEXT_ENTRIES:
            raise ConfigError(f"{folder}: it has more than {_MAX_CONTEXT_ENTRIES} entries")
        name = os.fsencode(path.relative_to(folder))
        # Every part has a fixed length or is preceded by it, so no two folders look the same.
        digest.update(b"%d %d " % (len(name), mode) + name)
        if stat.S_ISLNK(mode):
            target = os.fsencode(os.readlink(path))
            digest.update(b"%d " % len(target) + target)
        elif stat.S_ISREG(mode):
            content = hashlib.blake2b(digest_size=32)
            for chunk in _chunks(path):
                num_bytes += len(chunk)
                if num_bytes > _MAX_CONTEXT_BYTES:
                    raise ConfigError(f"{folder}: it is larger than {_MAX_CONTEXT_BYTES >> 30} GiB")
                content.update(chunk)
            digest.update(content.digest())
    return digest.hexdigest()


def _entries(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield what a folder contains, in a fixed order, with the modes of the entries themselves."""
    waiting = [folder]
    while waiting:
        parent = waiting.pop()
        try:
            for path in sorted(islice(parent.iterdir(), _MAX_CONTEXT_ENTRIES + 1)):
                mode = path.lstat().st_mode
                if stat.S_ISDIR(mode):
                    waiting.append(path)
                elif not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                    raise ConfigError(f"{path}: it is not a file")
                yield path, mode
        except OSError as error:
            raise ConfigError(f"{error.filename or parent}: {error.strerror}") from None


def _chunks(path: Path) -> Iterator[bytes]:
    # Another process may replace the file by a link or a pipe after its mode was read.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path}: it is not a file")
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


class Table:
    """A table of a `task.toml`, with typed access to its values."""

    def __init__(self, path: Path, content: Mapping[str, Any], name: str = "") -> None:
        self._path, self._content, self._name = path, content, name

    @classmethod
    def of_file(cls, path: Path, root: Path) -> Self:
        """Read a file."""
        try:
            return cls(path, tomllib.loads(read_text(path, root)))
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: {error}") from None

    def __contains__(self, name: str) -> bool:
        return bool(self._content.get(name))

    def table(self, name: str) -> "Table":
        """Return a table, which may be absent."""
        value = self._content.get(name, {})
        if not isinstance(value, dict):
            raise self._invalid(name, "expected a table")
        return Table(self._path, value, f"{self._name}{name}.")

    def text(self, name: str) -> str | None:
        """Return a text; None if it is missing."""
        value = self._content.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > _MAX_CHARS or "\0" in value:
            raise self._invalid(name, f"expected a text of at most {_MAX_CHARS} characters")
        return value

    def number(self, name: str, default: float, highest: float) -> float:
        """Return a number above 0."""
        value = self._content.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or math.isnan(value) or not 0 < value <= highest:
            raise self._invalid(name, f"expected a number above 0, at most {highest:,g}")
        return float(value)

    def megabytes(self, number: str, size: str, default: str) -> int:
        """Return a size, given as a number of megabytes or as a text such as 2G."""
        if number in self:
            return round(self.number(number, 1, _MAX_MEGABYTES))
        given = self.text(size) or default
        found = _SIZE.fullmatch(given)
        megabytes = float(found[1]) * _UNITS[found[2].upper()] if found else 0
        if not 1 <= megabytes <= _MAX_MEGABYTES:
            raise self._invalid(size, f"{given!r} is not a size such as 2G")
        return int(megabytes)

    def place(self, name: str) -> str | None:
        """Return a path of the sandbox; None if it is missing."""
        value = self._content.get(name)
        if value is not None and not (isinstance(value, str) and value.startswith("/")):
            raise self._invalid(name, "expected a path that starts with /")
        given = self.text(name)
        return None if given is None else joined("/", given)

    def variables(self, name: str) -> dict[str, str]:
        """Return environment variables."""
        table = self.table(name)
        for variable in table._content:
            if not _VARIABLE.fullmatch(variable):
                raise self._invalid(name, f"{variable[:40]!r} is not a valid variable name")
        plain = {key: str(value) for key, value in table._content.items()}
        return {key: Table(self._path, plain, table._name).text(key) or "" for key in plain}

    def _invalid(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {self._name}{name}: {problem}")


@dataclass(frozen=True)
class Dockerfile:
    """The files, variables and working directory of a Dockerfile."""

    copied: Sequence[tuple[Path, str]]
    """Files and folders, with the paths of the sandbox that they are copied to."""
    variables: Mapping[str, str]
    directory: str
    needs_docker: str | None
    """The first instruction that only Docker can carry out."""


def read_dockerfile(context: Path, root: Path, *, is_built: bool) -> Dockerfile | None:
    """Read the Dockerfile of a folder; None if it is missing."""
    path = context / "Dockerfile"
    if not path.is_file():
        return None
    lines = read_text(path, root).splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    copied: list[tuple[Path, str]] = []
    variables: dict[str, str] = {}
    directory, needs_docker = "/", None
    for found in map(_INSTRUCTION.match, text.replace("\\\n", " ").splitlines()):
        if found is None:
            continue
        word, rest = found[1].upper(), found[2].strip()
        if word not in _SUPPORTED_INSTRUCTIONS or rest.startswith(("--from", "[")):
            needs_docker = needs_docker or f"{word} {rest[:40]}"
        elif word == "WORKDIR":
            directory = joined(directory, rest)
        elif word == "COPY" and not is_built:
            copied += _copied(path, rest, directory)
        elif word == "ENV":
            variables |= _variables(path, rest)
    return Dockerfile(copied, variables, directory, needs_docker)


def _variables(path: Path, given: str) -> dict[str, str]:
    """Return the variables that ENV sets: `A=1 B="2 3"`, or in the legacy form `A 1`."""
    name, _, rest = given.partition(" ")
    try:
        words = shlex.split(given) if "=" in name else [f"{name}={rest.strip()}"]
    except ValueError as error:
        raise ConfigError(f"{path}: `ENV {given[:40]}`: {error}") from None
    pairs = (word.partition("=") for word in words)
    return {name: value for name, equals, value in pairs if equals and _VARIABLE.fullmatch(name)}


def _copied(path: Path, given: str, directory: str) -> list[tuple[Path, str]]:
    """Return the sources and destinations of a COPY."""
    context = path.parent
    words = [word for word in given.split() if not word.startswith("--")]
    if len(words) < 2:
        raise ConfigError(f"{path}: `COPY {given[:40]}`: expected a source and a destination")
    *names, target = words
    destination, copies = joined(directory, target), []
    sources: list[Path] = []
    for name in names:
        pattern = posixpath.normpath(name.lstrip("/"))
        matches = sorted(context.glob(pattern)) if "*" in pattern else [context / pattern]
        is_own = all(match.resolve().is_relative_to(context.resolve()) for match in matches)
        if not is_own or not any(match.exists() for match in matches):
            raise ConfigError(f"{path}: `COPY {given[:40]}`: {context} contains no {name[:40]}")
        sources += matches
    for source in sources:
        is_renamed = len(sources) == 1 and not target.endswith("/")
        keeps_name = source.is_file() and not is_renamed
        copies.append((source, f"{destination}/{source.name}" if keeps_name else destination))
    return copies


def joined(directory: str, path: str) -> str:
    """Return an absolute path of the sandbox; `..` cannot leave it."""
    place = posixpath.normpath(posixpath.join(directory, path.strip("\"'")))
    return f"/{place.lstrip('/')}"
