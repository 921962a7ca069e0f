"""Checkpoints: model, optimizer, schedule, random state and ledger position, complete or absent.

checkpoints/000012/
    model/             Hugging Face directory (config, safetensors, tokenizer)
    state/             optimizer, schedule, random state and, with mixed precision, master weights;
                       sharded by rank, readable on any mesh
    state.json         state of the loop: ledger position, history

The directory is renamed into place as the last step, so a crash never leaves a partial checkpoint.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from agentrl.config.sections import TrainerSection
from agentrl.errors import ConfigError, WriteError
from agentrl.inference.weight_sync.version_files import remove_old_versions, version_dir
from agentrl.runtime.atomic_directory import commit_directory, stage_directory
from agentrl.schema import Run
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
        """The Hugging Face directory of the weights."""
        return self.path / MODEL_DIR

    @property
    def state_path(self) -> Path:
        """The directory with optimizer, schedule and random state.

        Raises:
            ConfigError: the checkpoint was saved with `--save_only_model`.
        """
        path = self.path / _STATE_DIR
        if not path.is_dir():
            raise ConfigError(
                f"{self.path} has no optimizer state (--save_only_model), so the run cannot be "
                f"resumed; start a new run with --model_name_or_path {self.model_path}"
            )
        return path


def checkpoints_root(output_path: Path) -> Path:
    """Return the directory that holds a run's checkpoints."""
    return output_path / "checkpoints"


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written; after a crash, the previous one remains the newest."""

    step: int
    staging: Path
    target: Path

    @classmethod
    def begin(cls, output_path: Path, *, step: int, model_dir: Path, history: History) -> Self:
        """Write everything except the ranks' state.

        Args:
            output_path: the run's output directory.
            step: optimizer steps done.
            model_dir: Hugging Face directory of the weights after that step; its files are
                hard-linked if the file system allows it, else copied.
            history: the run so far.

        Raises:
            WriteError: writing failed.
        """
        target = version_dir(checkpoints_root(output_path), step)
        staging = stage_directory(target)
        try:
            shutil.copytree(model_dir, staging / MODEL_DIR, copy_function=_link_or_copy)
            state = {"format": _FORMAT, "step": step, "history": history.model_dump(mode="json")}
            (staging / _STATE_FILE).write_text(json.dumps(state))
        except OSError as error:
            raise WriteError(f"cannot write {target}: {error.strerror or error}") from error
        return cls(step, staging, target)

    @property
    def state_path(self) -> Path:
        """Directory for the ranks' state; not created with `--save_only_model`."""
        return self.staging / _STATE_DIR

    def finish(self, *, keep: int) -> Path:
        """Rename the draft to its final place and remove old checkpoints.

        Args:
            keep: number of checkpoints to keep.

        Raises:
            WriteError: the rename failed.
        """
        commit_directory(self.staging, self.target)
        remove_old_versions(self.target.parent, keep=keep, in_use=())
        return self.target


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
    return target


def latest_checkpoint(output_path: Path, *, at_most: int | None = None) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, if there is one.

    Args:
        output_path: the run's output directory.
        at_most: ignore the checkpoints of later steps.

    Raises:
        ConfigError: its format is not supported.
    """
    root = checkpoints_root(output_path)
    if not root.is_dir():
        return None
    complete = sorted(
        path
        for path in root.iterdir()
        if path.name.isdigit()
        and (path / _STATE_FILE).is_file()
        and (at_most is None or int(path.name) <= at_most)
    )
    if not complete:
        return None
    newest = complete[-1]
    state = json.loads((newest / _STATE_FILE).read_text())
    if state["format"] != _FORMAT:
        raise ConfigError(f"{newest}: checkpoint format {state['format']} is not supported")
    return Checkpoint(
        path=newest, step=int(state["step"]), history=History.model_validate(state["history"])
    )


class RankStates(Protocol):
    """The ranks' part of a checkpoint. `WorkerGroup` implements it; importers stay torch-free."""

    async def save_state(self, directory: Path, *, in_background: bool) -> None:
        """Write the state; `in_background` returns once it is copied."""

    async def wait_saved(self) -> None:
        """Return when the state is written."""


def check_has_database(checkpoint: Checkpoint | None, run: Run | None) -> None:
    """Refuse to resume from a checkpoint whose records are gone.

    Raises:
        ConfigError: there is a checkpoint, and no run in the database.
    """
    if checkpoint is not None and run is None:
        raise ConfigError(
            f"{checkpoint.path} is the checkpoint of a run whose database is empty; use another "
            "--run_name, or --fresh --delete_existing to start over"
        )


class CheckpointSaver:
    """Writes a run's checkpoints one after the other; with `--async_save`, during training."""

    def __init__(
        self,
        output_path: Path,
        *,
        group: RankStates,
        trainer: TrainerSection,
        saved_step: int,
        on_saved: Callable[[int], Awaitable[object]] | None = None,
    ) -> None:
        """Start after the newest checkpoint.

        Args:
            output_path: the run's output directory.
            group: the ranks, whose state is written.
            trainer: how to save, and how many to keep.
            saved_step: step of the newest checkpoint.
            on_saved: called with the step of every checkpoint once it is complete.
        """
        self._output_path = output_path
        self._group = group
        self._trainer = trainer
        self._on_saved = on_saved
        self._saving: asyncio.Task[None] | None = None
        self.saved_step = saved_step
        """Step of the newest complete checkpoint."""

    async def save(self, model_dir: Path, history: History) -> None:
        """Write a checkpoint; with `--async_save`, return as soon as its content is copied.

        Args:
            model_dir: Hugging Face directory of the weights after the last step.
            history: the run so far.

        Raises:
            WriteError: writing this checkpoint or the previous one failed.
        """
        await self.settle()
        draft = await asyncio.to_thread(
            Draft.begin,
            self._output_path,
            step=history.last_step,
            model_dir=model_dir,
            history=history,
        )
        in_background = self._trainer.async_save
        if not self._trainer.save_only_model:
            await self._group.save_state(draft.state_path, in_background=in_background)
        self._saving = asyncio.create_task(self._finish(draft))
        if not in_background:
            await self.settle()

    async def settle(self) -> None:
        """Wait until the checkpoint in progress, if any, is complete.

        Raises:
            WriteError: writing it failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def cancel(self) -> None:
        """Cancel the checkpoint in progress, if any; an incomplete checkpoint is never used."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.wait([self._saving])

    async def _finish(self, draft: Draft) -> None:
        await self._group.wait_saved()
        await asyncio.to_thread(draft.finish, keep=self._trainer.save_total_limit)
        # After the rename: the ledger must not count records as trained that no checkpoint contains.
        if self._on_saved is not None:
            await self._on_saved(draft.step)
        self.saved_step = draft.step
