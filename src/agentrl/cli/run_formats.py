"""Formats of `agentrl store export` that plugins add."""

from pathlib import Path
from typing import Protocol

from agentrl.store import TrajectoryStore


class RunExport(Protocol):
    """Writes a run to files."""

    async def __call__(self, store: TrajectoryStore, folder: Path) -> tuple[str, dict[str, int]]:
        """Write the run to a folder that must not exist."""
