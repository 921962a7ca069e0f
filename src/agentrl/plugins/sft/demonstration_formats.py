"""Runs as demonstrations: formats of `agentrl store export`."""

from pathlib import Path

from agentrl.plugins.sft.demonstrations.conversations import export_conversations
from agentrl.store import TrajectoryStore


async def export_chat(store: TrajectoryStore, folder: Path) -> tuple[str, dict[str, int]]:
    """Write conversations as JSON lines; see `agentrl.cli.run_formats.RunExport`."""
    return "conversations", await export_conversations(store, folder, "chat")


async def export_dataset(store: TrajectoryStore, folder: Path) -> tuple[str, dict[str, int]]:
    """Write conversations as a Hugging Face dataset."""
    return "conversations", await export_conversations(store, folder, "dataset")
