"""Runs as demonstrations: formats of `agentrl store export` and `agentrl store import`."""

from dataclasses import asdict
from pathlib import Path

from agentrl.plugins.sft.demonstrations.atif_attempts import check_trajectories
from agentrl.plugins.sft.demonstrations.atif_export import export_trajectories
from agentrl.plugins.sft.demonstrations.atif_import import import_trajectories
from agentrl.plugins.sft.demonstrations.conversations import export_conversations
from agentrl.runtime.printable import counted
from agentrl.store import TrajectoryStore


async def export_chat(store: TrajectoryStore, folder: Path) -> tuple[str, dict[str, int]]:
    """Write conversations as JSON lines; see `agentrl.cli.run_formats.RunExport`."""
    return "conversations", await export_conversations(store, folder, "chat")


async def export_dataset(store: TrajectoryStore, folder: Path) -> tuple[str, dict[str, int]]:
    """Write conversations as a Hugging Face dataset."""
    return "conversations", await export_conversations(store, folder, "dataset")


async def export_atif(store: TrajectoryStore, folder: Path) -> tuple[str, dict[str, int]]:
    """Write attempts as Harbor's trajectories."""
    return "trajectories", await export_trajectories(store, folder)


class AtifImport:
    """Reads Harbor's trajectories; see `agentrl.cli.run_formats.RunImport`."""

    def check(self, path: Path) -> None:
        """Refuse what is no trajectory, before a database is created for it."""
        check_trajectories(path)

    async def read(
        self, store: TrajectoryStore, path: Path, score: float | None
    ) -> tuple[str, dict[str, int]]:
        """Read the trajectories into an empty database."""
        counts = await import_trajectories(store, path, score=score)
        text = (
            f"{counted(counts.num_records, 'record')} of {counted(counts.num_tasks, 'task')} in "
            f"{store.redacted_uri}: {counts.num_trainable_turns} of {counts.num_turns} turns have "
            "token ids"
        )
        num_unscored = counts.num_records - counts.num_scored
        if num_unscored:
            text += (
                f"; no score for {counted(num_unscored, 'record')} (--score, agentrl store rescore)"
            )
        return text, asdict(counts)


ATIF_IMPORT = AtifImport()
