"""Checkpoints: model, optimizer, schedule, random state and ledger position, complete or absent.

checkpoints/000012/
    model/             Hugging Face directory (config, safetensors, tokenizer)
    state/             optimizer, schedule, random state and, with mixed precision, master weights;
                       sharded by rank, readable on any mesh
    state.json         state of the loop: ledger position, totals and last step of the history
    digests.json       SHA-256 of every file above

The directory is renamed into place as the last step, so a crash never leaves a partial checkpoint.
The steps before the last one are in the run's metrics.jsonl, and losses on held-out conversations in
eval_losses.jsonl, so that a checkpoint does not grow with the run. Files that differ from their digests make a checkpoint damaged: the intact one before it is
used.
"""

import asyncio
import itertools
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from agentrl.config.atomic_file import flush
from agentrl.config.sections import TrainerSection
from agentrl.errors import ConfigError, WriteError
from agentrl.inference.weight_sync.version_files import (
    checksum_of,
    remove_old_versions,
    version_dir,
)
from agentrl.runtime.atomic_directory import (
    clear_leftovers,
    commit_directory,
    stage_directory,
)
from agentrl.schema import Run
from agentrl.trainer.metrics.history import History
from agentrl.trainer.metrics.metrics_file import (
    EVAL_LOSSES_FILE,
    METRICS_FILE,
    eval_losses_until,
    metrics_until,
)

logger = logging.getLogger(__name__)

MODEL_DIR = "model"
_STATE_DIR = "state"
_STATE_FILE = "state.json"
_DIGESTS_FILE = "digests.json"
_FORMAT = 3
_FORMAT_WITHOUT_DIGESTS = 2
"""Its `state.json` holds all steps of the history."""
_HASH_THREADS = 8


class _DamagedCheckpoint(Exception):
    """A checkpoint's files are not those that were written."""


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
    def has_state(self) -> bool:
        """Whether steps can follow it; False with `--save_only_model`."""
        return (self.path / _STATE_DIR).is_dir()

    @property
    def state_path(self) -> Path:
        """The directory with optimizer, schedule and random state.

        Raises:
            ConfigError: the checkpoint was saved with `--save_only_model`.
        """
        path = self.path / _STATE_DIR
        if not self.has_state:
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
            shutil.copytree(model_dir, staging / MODEL_DIR, copy_function=link_or_copy)
            unlisted = {"steps": history.steps[-1:], "evals": [], "eval_losses": {}}
            last_step = history.model_copy(update=unlisted)
            state = {"format": _FORMAT, "step": step, "history": last_step.model_dump(mode="json")}
            (staging / _STATE_FILE).write_text(json.dumps(state))
            for name in (METRICS_FILE, EVAL_LOSSES_FILE):
                if (output_path / name).exists():
                    flush(output_path / name)
        except OSError as error:
            raise WriteError(f"cannot write {target}: {error.strerror or error}") from error
        return cls(step, staging, target)

    @property
    def state_path(self) -> Path:
        """Directory for the ranks' state; not created with `--save_only_model`."""
        return self.staging / _STATE_DIR

    def finish(self, *, keep: int) -> Path:
        """Add the digests, rename the draft to its final place, and remove old checkpoints.

        Args:
            keep: number of checkpoints to keep.

        Raises:
            WriteError: the digests could not be written, or the rename failed.
        """
        try:
            (self.staging / _DIGESTS_FILE).write_text(json.dumps(_digests(self.staging)))
        except OSError as error:
            raise WriteError(f"cannot write {self.target}: {error.strerror or error}") from error
        commit_directory(self.staging, self.target)
        remove_old_versions(self.target.parent, keep=keep, in_use=())
        return self.target


def link_or_copy(source: str, target: str) -> str:
    """Make a file that is never changed appear at another path; return that path."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
    return target


def checkpoint_paths(output_path: Path, *, at_most: int | None = None) -> list[Path]:
    """Return the complete checkpoints of a run, the oldest first; their files may be damaged.

    Args:
        output_path: the run's output directory.
        at_most: ignore the checkpoints of later steps.
    """
    root = checkpoints_root(output_path)
    return sorted(
        path
        for path in (root.iterdir() if root.is_dir() else ())
        if path.name.isdigit()
        and (path / _STATE_FILE).is_file()
        and (at_most is None or int(path.name) <= at_most)
    )


def latest_checkpoint(output_path: Path, *, at_most: int | None = None) -> Checkpoint | None:
    """Return the newest intact checkpoint of a run; None if it has none at all.

    Args:
        output_path: the run's output directory.
        at_most: ignore the checkpoints of later steps.

    Raises:
        ConfigError: its format is not supported, or all are damaged.
    """
    paths = checkpoint_paths(output_path, at_most=at_most)
    for path in reversed(paths):
        try:
            return _intact(path)
        except _DamagedCheckpoint as damage:
            logger.warning("checkpoint %s is damaged and not used: %s", path, damage)
    if paths:
        raise ConfigError(
            f"all checkpoints in {checkpoints_root(output_path)} are damaged; restore one from a "
            "backup, or move them away to train from version 0"
        )
    return None


def checkpoint_to_resume(output_path: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint, and rename damaged ones after it (`000012.damaged`).

    Under their new names they are neither replaced nor removed by the resumed run.

    Raises:
        ConfigError: its format is not supported, or all are damaged.
    """
    clear_leftovers(checkpoints_root(output_path))
    checkpoint = latest_checkpoint(output_path)
    for path in checkpoint_paths(output_path) if checkpoint is not None else ():
        if checkpoint is not None and path.name > checkpoint.path.name:
            kept = _free_name(path.with_name(f"{path.name}.damaged"))
            path.rename(kept)
            logger.warning("resuming from %s; the damaged %s is kept", checkpoint.path, kept)
    return checkpoint


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not name.exists())


def _intact(path: Path) -> Checkpoint:
    """Read a checkpoint; it is checked if it has digests, as all of the present format do.

    Raises:
        ConfigError: its format is not supported.
        _DamagedCheckpoint: its files are not those that were written.
    """
    has_digests = (path / _DIGESTS_FILE).exists()
    if has_digests:
        _check_digests(path)
    try:
        state = json.loads((path / _STATE_FILE).read_bytes())
        found_format, step = state["format"], int(state["step"])
        history = History.model_validate(state["history"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _DamagedCheckpoint(f"{_STATE_FILE} cannot be read") from error
    if found_format not in (_FORMAT, _FORMAT_WITHOUT_DIGESTS):
        raise ConfigError(f"{path}: checkpoint format {found_format} is not supported")
    if found_format == _FORMAT:
        if not has_digests:
            raise _DamagedCheckpoint(f"{_DIGESTS_FILE} is missing")
        before = metrics_until(path.parents[1], step - 1)
        history.steps = [*before, *history.steps]
        # Checkpoints of earlier releases hold them.
        history.eval_losses |= eval_losses_until(path.parents[1], step)
    return Checkpoint(path, step, history)


def _check_digests(path: Path) -> None:
    try:
        expected: dict[str, Any] = dict(json.loads((path / _DIGESTS_FILE).read_bytes()))
        found = _digests(path)
    except (OSError, ValueError, TypeError) as error:
        raise _DamagedCheckpoint(f"{_DIGESTS_FILE} cannot be read") from error
    if not (path / _STATE_DIR).is_dir():  # a bundle omits it where only weights are compared
        expected = {n: d for n, d in expected.items() if not n.startswith(f"{_STATE_DIR}/")}
    for name, digest in sorted(expected.items()):
        if found.get(name) != digest:
            problem = "has other content than was written" if name in found else "is missing"
            raise _DamagedCheckpoint(f"{name} {problem}")


def _digests(directory: Path) -> dict[str, str]:
    """Return the digests of all files below a directory, by relative path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [path.relative_to(directory).as_posix() for path in files]
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        digests = dict(zip(names, pool.map(checksum_of, ([path] for path in files)), strict=True))
    digests.pop(_DIGESTS_FILE, None)
    return digests


class RankStates(Protocol):
    """The ranks' part of a checkpoint. `WorkerGroup` implements it; importers stay torch-free."""

    async def save_state(self, directory: Path, *, in_background: bool) -> None:
        """Write the state; `in_background` returns once it is copied."""

    async def wait_saved(self) -> None:
        """Return when the state is written."""


def check_has_database(checkpoint_path: Path | None, run: Run | None) -> None:
    """Refuse to resume from a checkpoint whose records are gone.

    Raises:
        ConfigError: there is a checkpoint, and no run in the database.
    """
    if checkpoint_path is not None and run is None:
        raise ConfigError(
            f"{checkpoint_path} is the checkpoint of a run whose database is empty; use another "
            "--run_name, or --fresh --delete_existing to start over"
        )


class CheckpointSaver:
    """Writes a run's checkpoints one after the other; with `async_save`, during training."""

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
        """Write a checkpoint; with `async_save`, return as soon as its content is copied.

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
