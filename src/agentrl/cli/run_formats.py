"""Formats of `agentrl store export` and `agentrl store import` that plugins add."""

from pathlib import Path
from typing import Protocol

from agentrl.errors import ConfigError
from agentrl.plugin_registry import hooks, imported
from agentrl.store import TrajectoryStore


class RunExport(Protocol):
    """Writes a run to files."""

    async def __call__(self, store: TrajectoryStore, folder: Path) -> tuple[str, dict[str, int]]:
        """Write the run to a folder that must not exist.

        Returns:
            What was written, in the plural, and how many of it each split has.
        """


class RunImport(Protocol):
    """Reads a run from files."""

    def check(self, path: Path) -> None:
        """Check the files before a database is created for them.

        Raises:
            DatasetError: they are malformed, or of another format.
        """

    async def read(
        self, store: TrajectoryStore, path: Path, score: float | None
    ) -> tuple[str, dict[str, int]]:
        """Read them into an empty database.

        Args:
            store: the database.
            path: a file or a folder that `check` accepts.
            score: score of attempts that have none.

        Returns:
            A line for the user, and the counts in it.
        """


def import_of(path: Path) -> RunImport:
    """Return what reads files that `agentrl store export` did not write.

    Raises:
        ConfigError: no plugin reads any.
        DatasetError: the files are malformed.
    """
    problem = ConfigError(f"{path} is no export of `agentrl store export`")
    for target in hooks("imports").values():
        found: RunImport = imported(target)
        try:
            found.check(path)
        except ConfigError as error:
            problem = error
        else:
            return found
    raise problem
