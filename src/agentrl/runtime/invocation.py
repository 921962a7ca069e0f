"""The `agentrl` command as the user of this process can type it, for messages that name a command."""

import os
import shlex
import shutil
import sys
from pathlib import Path


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
