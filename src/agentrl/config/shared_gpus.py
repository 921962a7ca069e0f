"""How a GPU that trainer and servers share is divided, and the note of a trainer that ran out of it."""

import json
from datetime import UTC, datetime
from pathlib import Path

from agentrl.config.atomic_file import write_atomically

SERVER_RESERVE = 0.1
"""Fraction of a GPU that a server uses besides weights and cache: passes and CUDA graphs. SGLang itself
leaves about as much free."""
_SHORTAGE_FILE = "out_of_gpu_memory.json"


def trainer_fraction(inf_mem_ratio: float) -> float:
    """Return the fraction of a GPU that remains for the trainer's tensors."""
    return max(0.0, 1 - SERVER_RESERVE - inf_mem_ratio)


def note_shortage(output_path: Path, error: str) -> None:
    """Record that the trainer ran out of memory beside the servers."""
    shortage = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "error": error}
    write_atomically(output_path / _SHORTAGE_FILE, json.dumps(shortage) + "\n")


def shortage_of(output_path: Path) -> str | None:
    """Return that the trainer of a run ran out of memory beside the servers; None if it never did."""
    path = output_path / _SHORTAGE_FILE
    if not path.exists():
        return None
    at = datetime.fromisoformat(json.loads(path.read_text())["at"])
    return (
        f"the trainer ran out of GPU memory beside the server at {at:%Y-%m-%d %H:%M} UTC ({path})"
    )
