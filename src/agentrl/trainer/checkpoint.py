"""Checkpoints: model, optimizer, schedule, random state and ledger position, whole or absent.

checkpoints/000012/
    model/             Hugging Face directory (config, safetensors, tokenizer)
    optimizer.pt       AdamW state by parameter name, scheduler state, random states
    state.json         what the loop needs to go on, written last
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import ConfigError
from agentrl.trainer.history import History
from agentrl.weight_sync.files import remove_old_versions, version_dir, write_atomically

MODEL_DIR = "model"
_OPTIMIZER_FILE = "optimizer.pt"
_STATE_FILE = "state.json"
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    step: int
    history: History

    @property
    def model_path(self) -> Path:
        """The Hugging Face directory in it."""
        return self.path / MODEL_DIR

    def optimizer_state(self) -> dict[str, Any]:
        """Load optimizer, scheduler and random states.

        Raises:
            ConfigError: the run was saved with `--save_only_model`.
        """
        path = self.path / _OPTIMIZER_FILE
        if not path.is_file():
            raise ConfigError(
                f"{self.path} holds no optimizer state (--save_only_model), so the run cannot be "
                f"resumed; start a new run with --model_name_or_path {self.model_path}"
            )
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state


def checkpoints_root(output_path: Path) -> Path:
    """Return the directory that holds a run's checkpoints."""
    return output_path / "checkpoints"


def write_checkpoint(
    output_path: Path,
    *,
    step: int,
    model_dir: Path,
    optimizer_state: dict[str, Any] | None,
    history: History,
    keep: int,
) -> Path:
    """Write a checkpoint and remove old ones; a crash at any point leaves the previous one whole.

    Args:
        output_path: the run's output directory.
        step: optimizer steps done.
        model_dir: Hugging Face directory of the weights after that step; hard-linked or copied.
        optimizer_state: tensors and plain values; None leaves it out.
        history: what the run did so far.
        keep: number of checkpoints that stay.
    """
    root = checkpoints_root(output_path)

    def fill(directory: Path) -> None:
        shutil.copytree(model_dir, directory / MODEL_DIR)
        if optimizer_state is not None:
            torch.save(optimizer_state, directory / _OPTIMIZER_FILE)
        state = {"format": _FORMAT, "step": step, "history": history.to_json()}
        (directory / _STATE_FILE).write_text(json.dumps(state))

    target = write_atomically(version_dir(root, step), fill)
    remove_old_versions(root, keep=keep, in_use=())
    return target


def latest_checkpoint(output_path: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run, if there is one.

    Raises:
        ConfigError: the newest one was written by a version of this program that is not known.
    """
    root = checkpoints_root(output_path)
    if not root.is_dir():
        return None
    whole = sorted(path for path in root.iterdir() if path.name.isdigit() and _is_whole(path))
    if not whole:
        return None
    state = json.loads((whole[-1] / _STATE_FILE).read_text())
    if state["format"] != _FORMAT:
        raise ConfigError(f"{whole[-1]}: checkpoint format {state['format']} is not known here")
    return Checkpoint(
        path=whole[-1], step=int(state["step"]), history=History.from_json(state["history"])
    )


def _is_whole(path: Path) -> bool:
    return (path / _STATE_FILE).is_file()
