"""Other interpreters: which one to use, and what is installed there."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.integrations.agent_worker.description import AgentDescription


def checked_program(name: str, given: object) -> str:
    """Return the path of an interpreter that the user named.

    Args:
        name: of the setting, for messages.
        given: its value.

    Raises:
        ConfigError: there is no such program.
    """
    if shutil.which(str(given)) is None:
        raise ConfigError(f"config: {name} {given}: no such program")
    return str(given)


def has_package(python: str | Path, package: str, environment: Mapping[str, str]) -> bool:
    """Return whether an interpreter finds a package, without importing it."""
    look = f"import importlib.util as u; print(u.find_spec({package!r}) is not None)"
    found = subprocess.run(
        [python, "-c", look], env=environment, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() == "True"


def check_can_play(description: AgentDescription) -> None:
    """Check that hosts, which run in this interpreter, have what the agent needs.

    Raises:
        ConfigError: it is an agent of AWorld's, which is not installed here.
    """
    if description.kind in ("agent", "swarm") and importlib.util.find_spec("aworld") is None:
        raise ConfigError(
            f"agent: AWorld is not installed for {sys.executable}, which is to play it; make an "
            "environment with scripts/setup_agents aworld FOLDER, and run this with its Python"
        )
