"""Parses tasks in Harbor's format from untrusted files.

Input: a folder, and the root that it must not point outside. Output: values of bounded size, or a
one-line `ConfigError` that names the file. Nothing is run or copied here.
"""

import math
import os
import posixpath
import re
import shlex
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agentrl.errors import ConfigError

_MAX_TEXT_BYTES = 1 << 20
_MAX_CHARS = 1000
_MAX_MEGABYTES = 1 << 20
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", re.IGNORECASE)
_UNITS = {"": 1 / 2**20, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_STEP = re.compile(r"^\s*(\w+)\s+(.*)$")
_READ_STEPS = frozenset({"FROM", "WORKDIR", "COPY", "ENV", "CMD", "ENTRYPOINT", "LABEL"})
"""Steps of a Dockerfile that a plain process has, or has no need of."""


def read_text(path: Path, root: Path) -> str:
    """Return a file's text.

    Raises:
        ConfigError: it is missing, is not text of at most 1 MiB, or points outside the root.
    """
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

    Raises:
        ConfigError: it points outside, is absent, or is neither a file nor a folder.
    """
    places = [path]
    for folder, folders, files in os.walk(path):
        places += [Path(folder, name) for name in (*folders, *files)]
    for place in places:
        try:
            found = place.resolve(strict=True)
            mode = found.stat().st_mode
        except (OSError, RuntimeError) as error:  # absent, or links in a circle
            raise ConfigError(f"{place}: {getattr(error, 'strerror', error)}") from None
        if not found.is_relative_to(root.resolve()):
            raise ConfigError(f"{place}: it points outside {root}")
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(f"{place}: it is not a file")


class Table:
    """A table of a `task.toml`, with typed access to its values."""

    def __init__(self, path: Path, content: Mapping[str, Any], name: str = "") -> None:
        self._path, self._content, self._name = path, content, name

    @classmethod
    def of_file(cls, path: Path, root: Path) -> Self:
        """Read a file.

        Raises:
            ConfigError: it cannot be read.
        """
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
        found = self._content.get(name, {})
        if not isinstance(found, dict):
            raise self._wrong(name, "expected a table")
        return Table(self._path, found, f"{self._name}{name}.")

    def text(self, name: str) -> str | None:
        """Return a text; None if it is missing."""
        found = self._content.get(name)
        if found is None:
            return None
        if not isinstance(found, str) or len(found) > _MAX_CHARS or "\0" in found:
            raise self._wrong(name, f"expected a text of at most {_MAX_CHARS} characters")
        return found

    def number(self, name: str, default: float, highest: float) -> float:
        """Return a number above 0."""
        found = self._content.get(name, default)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or math.isnan(found) or not 0 < found <= highest:
            raise self._wrong(name, f"expected a number above 0, at most {highest:,g}")
        return float(found)

    def megabytes(self, number: str, size: str, default: str) -> int:
        """Return a size, given as a number of megabytes or as a text such as 2G."""
        if number in self:
            return round(self.number(number, 1, _MAX_MEGABYTES))
        given = self.text(size) or default
        found = _SIZE.fullmatch(given)
        megabytes = float(found[1]) * _UNITS[found[2].upper()] if found else 0
        if not 1 <= megabytes <= _MAX_MEGABYTES:
            raise self._wrong(size, f"{given!r} is not a size such as 2G")
        return int(megabytes)

    def place(self, name: str) -> str | None:
        """Return a path of the sandbox; None if it is missing."""
        found = self._content.get(name)
        if found is not None and not (isinstance(found, str) and found.startswith("/")):
            raise self._wrong(name, "expected a path that starts with /")
        given = self.text(name)
        return None if given is None else joined("/", given)

    def variables(self, name: str) -> dict[str, str]:
        """Return environment variables."""
        table = self.table(name)
        for variable in table._content:
            if not _VARIABLE.fullmatch(variable):
                raise self._wrong(name, f"{variable[:40]!r} is not a valid variable name")
        plain = {key: str(value) for key, value in table._content.items()}
        return {key: Table(self._path, plain, table._name).text(key) or "" for key in plain}

    def _wrong(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {self._name}{name}: {problem}")


@dataclass(frozen=True)
class Dockerfile:
    """The files, variables and working directory of a Dockerfile."""

    copied: Sequence[tuple[Path, str]]
    """Files and folders, with the paths of the sandbox that they are copied to."""
    variables: Mapping[str, str]
    directory: str
    needs_docker: str | None
    """The first step that a plain process cannot do without."""


def read_dockerfile(context: Path, root: Path, *, is_built: bool) -> Dockerfile | None:
    """Read the Dockerfile of a folder; None if it is missing.

    Args:
        context: the folder.
        root: the root that it must not point outside.
        is_built: Docker builds it, so its copied files are not checked.

    Raises:
        ConfigError: it cannot be read, or copies files from outside its folder.
    """
    path = context / "Dockerfile"
    if not path.is_file():
        return None
    lines = read_text(path, root).splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    copied: list[tuple[Path, str]] = []
    variables: dict[str, str] = {}
    directory, needs_docker = "/", None
    for step in map(_STEP.match, text.replace("\\\n", " ").splitlines()):
        if step is None:
            continue
        word, rest = step[1].upper(), step[2].strip()
        if word not in _READ_STEPS or rest.startswith(("--from", "[")):
            needs_docker = needs_docker or f"{word} {rest[:40]}"
        elif word == "WORKDIR":
            directory = joined(directory, rest)
        elif word == "COPY" and not is_built:
            copied += _copied(path, rest, directory)
        elif word == "ENV":
            variables |= _variables(path, rest)
    return Dockerfile(copied, variables, directory, needs_docker)


def _variables(path: Path, given: str) -> dict[str, str]:
    """Return what an ENV sets: `A=1 B="2 3"`, or as it was once, `A 1`."""
    name, _, rest = given.partition(" ")
    try:
        words = shlex.split(given) if "=" in name else [f"{name}={rest.strip()}"]
    except ValueError as error:
        raise ConfigError(f"{path}: `ENV {given[:40]}`: {error}") from None
    pairs = (word.partition("=") for word in words)
    return {name: value for name, equals, value in pairs if equals and _VARIABLE.fullmatch(name)}


def _copied(path: Path, given: str, directory: str) -> list[tuple[Path, str]]:
    context = path.parent
    words = [word for word in given.split() if not word.startswith("--")]
    if len(words) < 2:
        raise ConfigError(f"{path}: `COPY {given[:40]}`: expected a source and a destination")
    *names, target = words
    place, found = joined(directory, target), []
    sources: list[Path] = []
    for name in names:
        pattern = posixpath.normpath(name.lstrip("/"))
        given_by_it = sorted(context.glob(pattern)) if "*" in pattern else [context / pattern]
        is_own = all(one.resolve().is_relative_to(context.resolve()) for one in given_by_it)
        if not is_own or not any(one.exists() for one in given_by_it):
            raise ConfigError(f"{path}: `COPY {given[:40]}`: {context} contains no {name[:40]}")
        sources += given_by_it
    for source in sources:
        is_renamed = len(sources) == 1 and not target.endswith("/")
        into = source.is_file() and not is_renamed
        found.append((source, f"{place}/{source.name}" if into else place))
    return found


def joined(directory: str, path: str) -> str:
    """Return an absolute path of the sandbox; `..` cannot leave it."""
    place = posixpath.normpath(posixpath.join(directory, path.strip("\"'")))
    return f"/{place.lstrip('/')}"
