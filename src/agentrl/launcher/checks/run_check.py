"""Checks of plugins before a run starts."""

from collections.abc import Iterable, Iterator
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
    def hint(self) -> str:
        """What to do about the problems; empty, or text that follows the first one."""

    @property
    def note(self) -> str:
        """One line for the user of a run that starts."""

    def parts(self) -> dict[str, Any]:
        """Return everything as a JSON object, for `--dry_run --json`."""

    def lines(self) -> Iterable[str]:
        """Return everything as lines, for `--dry_run`."""


def run_checks(
    config: RootConfig, gpus: GpuMap, model_path: Path
) -> Iterator[tuple[str, RunCheck | None]]:
    """Yield the subject of each check and what it found, None where it does not apply.

    Raises:
        ConfigError: a check cannot be made.
    """
    for subject, target in hooks("run_checks").items():
        yield subject, imported(target)(config, gpus, model_path)
