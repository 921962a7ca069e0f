"""Isolates third-party programs, such as tool servers, from secrets and each other, with limits.

Input: a command. Output: the command line and the environment that start it in separate namespaces
(`confined_child`). On machines without namespaces, only its limits apply, and
`confinement_gap` reports it.
"""

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

_STARTER = Path(__file__).with_name("confined_child.py")
_PROBE_SECONDS = 20.0
_INHERITED = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "SHELL", "USER", "LOGNAME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    # Windows only.
    *("SYSTEMROOT", "PATHEXT", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "TEMP"),
)
"""Variables that every program inherits; none of them holds a secret."""
_CACHES = {
    "npm_config_cache": ".npm",
    "UV_CACHE_DIR": ".cache/uv",
    "UV_TOOL_DIR": ".local/uv-tools",
}
"""Where `npx` and `uvx` keep what they download, in the scratch directory: the home is read-only."""
_READ_ONLY = re.compile(
    r"read-only file|\[Errno 30\]|\bEROFS\b|readonly database|unable to open database file",
    re.IGNORECASE,
)
"""The error of a refused write, and those of SQLite; loggers may wrap a text anywhere."""


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """What one program can access."""

    scratch: Path
    """Its own directory. Sibling directories and all others of `scratch_directory` are hidden."""
    own_home: bool = False
    """Its scratch directory is its home; otherwise it reads the user's."""
    hidden: tuple[Path, ...] = ()
    """Files and directories that appear empty to it."""
    writable: tuple[Path, ...] = ()
    """Paths that it can write to in addition to its scratch directory."""
    memory_bytes: int = 0
    """Memory limit of each of its processes; 0 for none."""
    places: Mapping[str, Path] = field(default_factory=dict)
    """If not empty, it sees a separate root with the machine's programs, which it can only read, and
    these directories by their paths there, which it can write to. Needs namespaces."""
    directory: str = ""
    """With `places`: its working directory."""
    programs: tuple[Path, ...] = ()
    """With `places`: directories of further programs, which it can only read, such as a Python."""
    network: bool = True
    """Whether it can reach other machines and the servers of this one. Needs namespaces."""
    closed_ports: tuple[int, ...] = ()
    """TCP ports that it cannot connect to, on any machine. Needs Landlock."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that starts a command within these bounds."""
        if sys.platform != "linux":
            return list(argv)
        scratch, scratches = os.path.realpath(self.scratch), os.path.realpath(_scratches())
        is_among = scratch.startswith(f"{scratches}/")
        hidden = self.hidden if is_among else (*self.hidden, Path(scratches))
        plan = {
            **asdict(self),
            "scratch": scratch,
            "siblings": scratches if is_among else os.path.dirname(scratch),
            "hidden": [os.path.realpath(path) for path in hidden],
            "writable": [os.path.realpath(path.expanduser()) for path in self.writable],
            "places": {name: os.path.realpath(path) for name, path in self.places.items()},
            "programs": [os.path.realpath(path) for path in self.programs],
            "namespaces": confinement_gap() is None,
            "closed_ports": self.closed_ports if open_ports_reason() is None else (),
        }
        return [sys.executable, "-I", "-S", str(_STARTER), json.dumps(plan), *argv]

    def environment(self) -> dict[str, str]:
        """Return the program's environment: inherited variables, its home, TMPDIR, and caches."""
        scratch = str(self.scratch)
        home = scratch if self.own_home else os.environ.get("HOME", scratch)
        caches = {name: os.path.join(scratch, folder) for name, folder in _CACHES.items()}
        return inherited_environment() | {"HOME": home, "TMPDIR": scratch} | caches


def inherited_environment() -> dict[str, str]:
    """Return the variables of this process that any program may see."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ}


def read_only_hint(output: str) -> str:
    """Return how tools may write to a path, if a program's output says that it could not."""
    is_refused = _READ_ONLY.search(output) is not None
    return "; --tool_writable_paths names what tools may write to" if is_refused else ""


def scratch_directory(prefix: str) -> "tempfile.TemporaryDirectory[str]":
    """Create a directory that no confined program sees, but for the scratch directory that it has there."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir=_scratches(), ignore_cleanup_errors=True)


def _scratches() -> str:
    """Return the parent of such directories, which only this user may enter."""
    if sys.platform != "linux":
        return tempfile.gettempdir()
    root = os.path.join(tempfile.gettempdir(), f"agentrl-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(root, 0o700)
    found = os.lstat(root)
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return root if is_ours else tempfile.gettempdir()


@cache
def confinement_gap() -> str | None:
    """Return why programs cannot run in separate namespaces here; None if they can.

    Without namespaces, they see the processes and files that this user sees.
    """
    return _probe(namespaces=True)


@cache
def open_ports_reason() -> str | None:
    """Return why ports cannot be closed to programs here; None if they can."""
    return _probe(namespaces=False, closed_ports=(1,))


def _probe(*, namespaces: bool, closed_ports: tuple[int, ...] = ()) -> str | None:
    """Return why no program can be started like this."""
    if sys.platform != "linux":
        return f"{sys.platform} is not Linux"
    with tempfile.TemporaryDirectory() as root:
        scratch = Path(root) / "probe"
        scratch.mkdir(0o700)
        confinement = Confinement(scratch=scratch, closed_ports=closed_ports)
        plan = {**asdict(confinement), "siblings": root, "namespaces": namespaces}
        argv = [sys.executable, "-I", "-S", str(_STARTER), json.dumps(plan, default=str)]
        probe = subprocess.run(
            argv, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    return None if probe.returncode == 0 else probe.stderr.strip()
