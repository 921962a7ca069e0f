"""Checks of plugins before a run starts."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from agentrl.config.sections import RootConfig
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.plugin_registry import hooks, imported


class RunCheck(Protocol):
    """What a plugin found out about a run."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the run cannot start; empty if it can."""

    @property
    def note(self) -> str:
        """One line for the user of a run that starts."""

    def parts(self) -> dict[str, Any]:
        """Return everything as a JSON object, for `--dry_run --json`."""

    def lines(self) -> Iterable[str]:
        """Return everything as lines, for `--dry_run`."""


CheckRun = Callable[[RootConfig, GpuMap, Path], RunCheck | str | None]
"""A check: returns what it found; a note on why it does not apply, or None if there is none to make.
Raises `ConfigError` if it cannot be made.
"""


def run_checks() -> dict[str, CheckRun]:
    """Return the checks of all plugins, by subject."""
    return {subject: imported(target) for subject, target in hooks("run_checks").items()}
