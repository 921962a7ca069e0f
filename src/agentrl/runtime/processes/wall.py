"""The wall: a program that a model may control sees what is listed here, and nothing else exists for it.

Input: a command. Output: the command line and the environment that start it in a root of its own
(`wall_child`), with the system's programs, a scratch folder, and the paths that are opened to it. On
machines without namespaces, only its bounds apply, and `wall_gap` says why.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

_STARTER = Path(__file__).with_name("wall_child.py")
_PACKAGE = Path(__file__).parents[2]
_PROBE_SECONDS = 20.0
TOOL_MEMORY_BYTES, TOOL_DISK_BYTES = 4 << 30, 8 << 30
"""Of the processes of a tool together, and of the files in its scratch folder."""
_INHERITED = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "SHELL"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
)
"""Variables that every program inherits; none of them holds a secret."""
_CERTIFICATES = _INHERITED[-4:]
_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/nix/store/")
"""What every program sees."""
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta", "lib/python3*", "lib/node_modules")
_ENVIRONMENT_PARTS = ("bin", "lib", "lib64", "libexec", "share", "ssl", "pyvenv.cfg")
_SCRIPT = re.compile(rb"#!\s*(\S+)(?:\s+(\S+))?")
_JAVASCRIPT = (".js", ".mjs", ".cjs", ".ts")
_MISSING = re.compile(
    r"(?:No such file or directory|ENOENT)[^'\"\n]*['\"]([^'\"\n]+)|No module named '(\w+)"
)
_READ_ONLY = re.compile(
    r"read-only file|\[Errno 30\]|\bEROFS\b|readonly database|unable to open database file",
    re.IGNORECASE,
)
"""The error of a refused write, and those of SQLite; loggers may wrap a text anywhere."""


@dataclass(frozen=True, kw_only=True)
class Wall:
    """What one program can access."""

    scratch: Path | None = None
    """Its own folder, which is its home and TMPDIR."""
    readable: tuple[Path, ...] = ()
    """Files and folders that it reads."""
    writable: tuple[Path, ...] = ()
    """Files and folders that it also writes to."""
    places: Mapping[str, Path] = field(default_factory=dict)
    """Further folders of its own, by their paths there."""
    directory: str = ""
    """Its working directory, the scratch folder by default. One that is not shown is a private one,
    which shows only the opened paths in it."""
    network: bool = True
    """Whether it reaches other machines and the servers of this one."""
    memory_bytes: int = TOOL_MEMORY_BYTES
    """Most memory of its processes together, with files that exist in memory alone."""
    disk_bytes: int = TOOL_DISK_BYTES
    """Most bytes of files in its own folders."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that starts a command within these bounds."""
        if sys.platform != "linux":
            return list(argv)
        plan = {
            "mounts": list(self._mounts()),
            "home": self._home,
            "directory": os.path.abspath(self.directory or self._home),
            "network": self.network,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "spare_bytes": _spare_bytes(),
            "namespaces": wall_gap() is None,
        }
        return [sys.executable, "-I", "-S", str(_STARTER), json.dumps(plan), *argv]

    def environment(self) -> dict[str, str]:
        """Return the program's environment: what it inherits, its home and its TMPDIR."""
        return inherited_environment() | {"HOME": self._home, "TMPDIR": self._home}

    @property
    def _home(self) -> str:
        return "/tmp" if self.scratch is None else str(self.scratch)

    def _mounts(self) -> Iterator[tuple[str, str, bool, bool]]:
        """Yield source, target, whether it is writable, and whether it is the program's own."""
        certificates = (Path(os.environ[name]) for name in _CERTIFICATES if name in os.environ)
        shown = {_PACKAGE: False, **dict.fromkeys(_environment_of(Path(sys.executable)), False)}
        shown |= dict.fromkeys((*certificates, *self.readable), False)
        shown |= dict.fromkeys(self.writable, True)
        own = dict(self.places)
        if self.scratch is not None:
            own[self._home] = self.scratch
        found = {target: (os.path.realpath(path), True) for target, path in own.items()}
        # Folders before what lies in them: a link in a folder that is shown is the program's to change,
        # and opens nothing.
        named = ((os.path.abspath(path.expanduser()), one) for path, one in shown.items())
        for given, is_writable in sorted((Path(path), one) for path, one in named):
            above = (found[str(one)] for one in given.parents if str(one) in found)
            if not given.exists() or any(is_above >= is_writable for _, is_above in above):
                continue
            real = str(given.resolve())
            for target in (str(given), real):
                _, is_open = found.get(target, (real, False))
                if not f"{target}/".startswith(_SYSTEM):
                    found[target] = (real, is_writable or is_open)
        for target in sorted(found, key=lambda one: (one in own, one)):
            yield (found[target][0], target, found[target][1], target in own)


def named_paths(words: Sequence[str]) -> Iterator[Path]:
    """Yield what the words of a command line name: files, folders, programs and their environments.

    A word names a path if it has a slash or a dot; so does what follows the `=` of an option, and the
    module after `-m`. Words that a model wrote must not be among them.
    """
    program = shutil.which(words[0]) if words else None
    modules = [word.partition(".")[0] for before, word in pairwise(words) if before == "-m"]
    candidates = [*words, *(word.partition("=")[2] for word in words)]
    for text in (
        *(() if program is None else (program,)),
        *(f"./{module}" for module in modules),
        *(f"./{module}.py" for module in modules),
        *(text for text in candidates if "/" in text or "." in text),
    ):
        with suppress(OSError, ValueError):  # no path at all
            if os.path.exists(text):
                yield from _with_surroundings(Path(os.path.abspath(text)))


def _with_surroundings(path: Path) -> Iterator[Path]:
    """Yield a path and what it needs to run: its interpreter, environment, and Node packages."""
    yield path
    if path.is_dir():
        return
    real = path.resolve()
    packages = [one for one in real.parents if one.name == "node_modules"]
    if packages:
        yield packages[-1]
    elif real.suffix in _JAVASCRIPT:
        project = next((one for one in real.parents if (one / "package.json").exists()), None)
        if project is not None:
            names = ("package.json", "node_modules", real.relative_to(project).parts[0])
            yield from (project / name for name in names)
    if os.access(path, os.X_OK):
        yield from _environment_of(path)
        with path.open("rb") as file:
            first = _SCRIPT.match(file.readline(256))
        if first is not None:
            name = (first[2] if first[1].endswith(b"/env") else first[1]) or b""
            interpreter = shutil.which(os.fsdecode(name))
            yield from () if interpreter is None else _environment_of(Path(interpreter))


def _environment_of(program: Path) -> Iterator[Path]:
    """Yield a program, all links to it, and the Python or Node environment that it belongs to."""
    home, link = Path.home(), program
    for _ in range(8):
        yield link
        root = link.parent.parent
        is_environment = any(any(root.glob(mark)) for mark in _ENVIRONMENT_MARKS)
        if link.parent.name == "bin" and is_environment and str(root) not in ("/", "/usr"):
            is_shared = root in (home, home / ".local")
            yield from (root / name for name in _ENVIRONMENT_PARTS[: 2 if is_shared else None])
        if not link.is_symlink():
            return
        link = link.parent / link.readlink()


def _spare_bytes() -> int:
    """Return how little free memory makes the machine short of it: an eighth."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 3


def inherited_environment() -> dict[str, str]:
    """Return the variables of this process that any program may see."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ}


def wall_hint(output: str) -> str:
    """Return which flag opens what a program failed to find or to write to; may be empty."""
    if _READ_ONLY.search(output) is not None:
        return "; --tool_writable_paths names what tools may write to"
    for path, module in _MISSING.findall(output):
        names = (path,) if path else (f"{module}.py", module)
        if (found := next(filter(os.path.exists, names), None)) is not None:
            return f"; tools do not see {found}: --tool_visible_paths names what they may read"
    return ""


class ScratchDirectory:
    """A folder for one program; as a context, its path. It is removed with the process at the latest."""

    def __init__(self, prefix: str) -> None:
        self.name = tempfile.mkdtemp(prefix=prefix, dir=_scratches())
        self.cleanup = weakref.finalize(self, remove_folder, self.name)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def scratch_directory(prefix: str) -> ScratchDirectory:
    """Create a folder for one program."""
    return ScratchDirectory(prefix)


def remove_folder(folder: str | Path) -> None:
    """Remove a folder with whatever a program left in it: the standard library recurses, `rm` does not.

    Links are removed, not followed. What cannot be removed stays.
    """
    remove = ["rm", "-rf", "--", str(folder)]
    if subprocess.run(remove, stderr=subprocess.DEVNULL, check=False).returncode:
        # A program may have taken the owner's rights to its folders.
        allow = ["chmod", "-R", "u+rwX", "--", str(folder)]
        for command in (allow, remove):
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


def _scratches() -> str:
    """Return the parent of such folders, which only this user may enter."""
    if sys.platform != "linux":
        return tempfile.gettempdir()
    root = os.path.join(tempfile.gettempdir(), f"agentrl-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(root, 0o700)
    found = os.lstat(root)
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return root if is_ours else tempfile.gettempdir()


@cache
def wall_gap() -> str | None:
    """Return why programs cannot get a root of their own here; None if they can."""
    if sys.platform != "linux":
        return f"{sys.platform} is not Linux"
    with scratch_directory("agentrl-probe-") as scratch:
        plan = {
            "mounts": [[scratch, scratch, True, True]],
            "home": scratch,
            "directory": scratch,
            "network": True,
            "namespaces": True,
            "memory_bytes": TOOL_MEMORY_BYTES,
            "disk_bytes": TOOL_DISK_BYTES,
            "spare_bytes": 0,
        }
        argv = [sys.executable, "-I", "-S", str(_STARTER), json.dumps(plan)]
        probe = subprocess.run(
            argv, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    return None if probe.returncode == 0 else probe.stderr.strip()
