"""Training state on disk in torch's distributed checkpoint format; each rank writes its shards.

State written on one mesh can be read on any other. All ranks must share the file system. The format
uses pickles; reading accepts only torch's own metadata of tensors and plain values, so an
untrusted checkpoint cannot run code.
"""

import io
import pickle
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as metadata_module
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from agentrl.distributed.dtypes import dtype_named
from agentrl.distributed.mesh import Ranks
from agentrl.errors import ConfigError, WriteError

State = dict[str, Any]
"""Nested dicts of tensors (also DTensors) and plain values, of one structure on all ranks."""


class StateWriter:
    """Writes one state at a time, optionally in the background of training."""

    def __init__(self, ranks: Ranks) -> None:
        """Create a separate process group (collective)."""
        self._is_single_process = ranks.world_size == 1
        # Collectives of background writes must not interleave with those of training.
        self._group = ranks.new_group()
        self._pending: tuple[Future[Any], Path] | None = None

    def write(self, state: State, directory: Path, *, in_background: bool) -> None:
        """Write a state (collective)."""
        self.wait()
        _ignore_single_process_warning()
        options: dict[str, Any] = {
            "checkpoint_id": directory,
            "process_group": self._group,
            "no_dist": self._is_single_process,
        }
        if in_background:
            pending = async_save(state, **options)
            assert isinstance(pending, Future)
            self._pending = pending, directory
        else:
            with _write_errors(directory):
                save(state, **options)

    def wait(self) -> None:
        """Wait until this rank's state is written; on rank 0, until all ranks' states are."""
        pending, self._pending = self._pending, None
        if pending is not None:
            future, directory = pending
            with _write_errors(directory):
                future.result()


def read_state(state: State, directory: Path, ranks: Ranks) -> None:
    """Read a state of `StateWriter` into `state`, in place (collective)."""
    _ignore_single_process_warning()
    reader, planner = _MetadataReader(directory), _PlainValuePlanner()
    try:
        load(state, storage_reader=reader, planner=planner, no_dist=ranks.world_size == 1)
    except CheckpointException as error:
        failures = [reason for reason, _ in error.failures.values()]
        for reason in (reader.refusal, *failures):
            if isinstance(reason, pickle.UnpicklingError):
                line = str(reason).strip().splitlines()[0]
                raise ConfigError(f"{directory} is not a checkpoint of AgentRL: {line}") from error
        line = " ".join(str(failures[0]).split("\n", 1)[0].split())
        raise ConfigError(
            f"{directory} cannot be read ({type(failures[0]).__name__}: {line}); move this "
            "checkpoint away to resume from the one before"
        ) from error


_ALLOWED_GLOBALS = {
    *(("torch.distributed.checkpoint.metadata", name) for name in metadata_module.__all__),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
}
"""Globals that the pickled metadata may name: data classes, and functions that look up data."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and dtype_named(name) is not None
        if is_dtype or (module, name) in _ALLOWED_GLOBALS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata refers to {module}.{name}")


class _MetadataReader(FileSystemReader):
    """Unpickles only metadata of tensors, and rejects files outside the directory."""

    refusal: pickle.UnpicklingError | None = None
    """Why the metadata was rejected; torch passes on only the text."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            try:
                return self._checked(_MetadataUnpickler(file).load())
            except pickle.UnpicklingError as error:
                self.refusal = error
                raise

    def _checked(self, metadata: object) -> Metadata:
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it has no metadata")
        for storage in (metadata.storage_data or {}).values():
            if len(PurePath(storage.relative_path).parts) != 1:
                raise pickle.UnpicklingError(
                    f"it refers to a file outside the directory: {storage.relative_path}"
                )
        metadata.storage_meta = metadata.storage_meta or metadata_module.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainValuePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's planner unpickles without restrictions, so it receives the plain values read here.
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


@contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise WriteError(f"rank {rank} cannot write {directory}: {reason}") from error


def _ignore_single_process_warning() -> None:
    # torch warns whenever a single process reads or writes a checkpoint.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
