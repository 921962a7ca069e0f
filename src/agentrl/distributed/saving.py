"""Training state on disk through torch's distributed checkpoints: every rank writes its own part.

What is written by some ranks on some mesh is read by any others. The directory must be one that
all ranks see.
"""

import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from agentrl.distributed.ranks import Ranks
from agentrl.errors import WriteError

State = dict[str, Any]
"""Nested dicts of tensors (sharded ones too) and plain values; alike in structure on all ranks."""


class StateWriter:
    """Writes one state after the other, beside training where that is asked for."""

    def __init__(self, ranks: Ranks) -> None:
        """Set up (collective)."""
        self._is_alone = ranks.world_size == 1
        # What happens in the background must not get between the collectives of training.
        self._group = None if self._is_alone else dist.new_group(backend="gloo")
        self._pending: tuple[Future[Any], Path] | None = None

    def write(self, state: State, directory: Path, *, in_background: bool) -> None:
        """Write a state (collective).

        Args:
            state: what is to be written; with `in_background` it is copied first, so that the
                caller may change it.
            directory: made if it is not there.
            in_background: return when the copy is made; `wait` says when the state is written.

        Raises:
            WriteError: a rank could not write its part of this state, or of the one before it.
        """
        self.wait()
        _expect_one_process()
        options: dict[str, Any] = {
            "checkpoint_id": directory,
            "process_group": self._group,
            "no_dist": self._is_alone,
        }
        if in_background:
            pending = async_save(state, **options)
            assert isinstance(pending, Future)
            self._pending = pending, directory
        else:
            with _said_in_one_line(directory):
                save(state, **options)

    def wait(self) -> None:
        """Return when everything is written, on rank 0 also what the other ranks write.

        Raises:
            WriteError: a rank could not write its part.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            future, directory = pending
            with _said_in_one_line(directory):
                future.result()


def read_state(state: State, directory: Path, ranks: Ranks) -> None:
    """Overwrite a state in place with what `StateWriter` wrote (collective).

    Raises:
        CheckpointException: the directory does not hold it.
    """
    _expect_one_process()
    load(state, checkpoint_id=directory, no_dist=ranks.world_size == 1)


@contextmanager
def _said_in_one_line(directory: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise WriteError(f"rank {rank} cannot write {directory}: {reason}") from error


def _expect_one_process() -> None:
    # torch warns whenever a process without peers writes or reads a checkpoint.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
