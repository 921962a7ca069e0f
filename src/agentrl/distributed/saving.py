"""Training state on disk in torch's distributed checkpoint format; each rank writes its shards.

State written on one mesh can be read on any other. All ranks must share the file system.
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

from agentrl.distributed.mesh import Ranks
from agentrl.errors import WriteError

State = dict[str, Any]
"""Nested dicts of tensors (also DTensors) and plain values, of one structure on all ranks."""


class StateWriter:
    """Writes one state at a time, optionally in the background of training."""

    def __init__(self, ranks: Ranks) -> None:
        """Create a separate process group (collective)."""
        self._is_alone = ranks.world_size == 1
        # Collectives of background writes must not interleave with those of training.
        self._group = None if self._is_alone else dist.new_group(backend="gloo")
        self._pending: tuple[Future[Any], Path] | None = None

    def write(self, state: State, directory: Path, *, in_background: bool) -> None:
        """Write a state (collective).

        Args:
            state: the state; with `in_background` it is copied first, and the caller may change it
                on return.
            directory: created if missing.
            in_background: return as soon as the state is copied; `wait` waits for the files.

        Raises:
            WriteError: a rank could not write its part of this state or of the previous one.
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
            with _errors_in_one_line(directory):
                save(state, **options)

    def wait(self) -> None:
        """Wait until this rank's state is written; on rank 0, until all ranks' states are.

        Raises:
            WriteError: a rank could not write its part.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            future, directory = pending
            with _errors_in_one_line(directory):
                future.result()


def read_state(state: State, directory: Path, ranks: Ranks) -> None:
    """Read a state of `StateWriter` into `state`, in place (collective).

    Raises:
        CheckpointException: the directory holds no such state.
    """
    _expect_one_process()
    load(state, checkpoint_id=directory, no_dist=ranks.world_size == 1)


@contextmanager
def _errors_in_one_line(directory: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise WriteError(f"rank {rank} cannot write {directory}: {reason}") from error


def _expect_one_process() -> None:
    # torch warns each time that a single process writes or reads a checkpoint.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
