"""This installation: its version, its command as the user can type it, and its cache."""

import os
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_DISTRIBUTION = "agentrl-mongo"
_UNKNOWN = "0+unknown"


def package_version() -> str:
    """Return the version; a checkout that is not installed has none."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return _UNKNOWN


def user_cache(kind: str) -> Path:
    """Return the directory of one kind of files that this package can make again, `$XDG_CACHE_HOME/agentrl/KIND`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "agentrl" / kind


def typed_command(*words: str) -> str:
    """Return a command line that starts AgentRL from the working directory.

    It is `agentrl` if the shell finds this environment's script, else the script's path
    (`.venv/bin/agentrl`), else this interpreter with `-m agentrl`.
    """
    return " ".join([_program(), *map(shlex.quote, words)])


def _program() -> str:
    script = Path(sys.executable).with_name("agentrl")
    on_path = shutil.which("agentrl")
    if on_path is not None and script.exists() and os.path.samefile(on_path, script):
        return "agentrl"
    if script.exists():
        return shlex.quote(_display_path(script))
    return f"{shlex.quote(_display_path(Path(sys.executable)))} -m agentrl"


def _display_path(path: Path) -> str:
    """Return a path, relative if it is inside the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
