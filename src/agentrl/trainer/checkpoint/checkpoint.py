"""Checkpoints: model, optimizer, schedule, random state and ledger position, whole or absent.

checkpoints/000012/
    model/             Hugging Face directory (config, safetensors, tokenizer)
    state/             optimizer, schedule, random state and, where the weights above are rounded,
                       master weights: each rank's part of them, for any ranks to read
    state.json         what the loop needs to go on: ledger position, history
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agentrl.errors import ConfigError, WriteError
from agentrl.inference.weight_sync.version_files import remove_old_versions, version_dir
from agentrl.runtime.atomic_directory import commit_directory, stage_directory
from agentrl.trainer.metrics.history import History

MODEL_DIR = "model"
_STATE_DIR = "state"
_STATE_FILE = "state.json"
_FORMAT = 2


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

    @property
    def state_path(self) -> Path:
        """The directory with optimizer, schedule and random state.

        Raises:
            ConfigError: the run was saved with `--save_only_model`.
        """
        path = self.path / _STATE_DIR
        if not path.is_dir():
            raise ConfigError(
                f"{self.path} holds no optimizer state (--save_only_model), so the run cannot be "
                f"resumed; start a new run with --model_name_or_path {self.model_path}"
            )
        return path


def checkpoints_root(output_path: Path) -> Path:
    """Return the directory that holds a run's checkpoints."""
    return output_path / "checkpoints"


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written; a crash leaves the one before it the newest."""

    step: int
    staging: Path
    target: Path

    @classmethod
    def begin(cls, output_path: Path, *, step: int, model_dir: Path, history: History) -> Self:
        """Write everything but the ranks' state.

        Args:
            output_path: the run's output directory.
            step: optimizer steps done.
            model_dir: Hugging Face directory of the weights after that step; hard-linked where
                the file system can, copied elsewhere.
            history: what the run did so far.

        Raises:
            WriteError: it could not be written.
        """
        target = version_dir(checkpoints_root(output_path), step)
        staging = stage_directory(target)
        try:
            shutil.copytree(model_dir, staging / MODEL_DIR, copy_function=_link_or_copy)
            state = {"format": _FORMAT, "step": step, "history": history.to_json()}
            (staging / _STATE_FILE).write_text(json.dumps(state))
        except OSError as error:
            raise WriteError(f"cannot write {target}: {error.strerror or error}") from error
        return cls(step, staging, target)

    @property
    def state_path(self) -> Path:
        """Where the ranks write their state; left out with `--save_only_model`."""
        return self.staging / _STATE_DIR

    def finish(self, *, keep: int) -> Path:
        """Make it a checkpoint and remove old ones.

        Args:
            keep: number of checkpoints that stay.

        Raises:
            WriteError: it could not be moved to its place.
        """
        commit_directory(self.staging, self.target)
        remove_old_versions(self.target.parent, keep=keep, in_use=())
        return self.target


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
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
