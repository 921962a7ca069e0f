"""The changes between two versions of a model's weights, as a file.

Input: the tensors of a version, and of the previous one, under their names in the checkpoint.
Output: a directory with one safetensors file: for each changed tensor, the changed positions and
values, or the whole tensor if that is smaller; and a checksum (CRC-32) of every tensor of the new
version, changed or not. With the checksums, a reader can verify that its result equals the version
bit for bit. Independent of servers and policies.

At the learning rates of reinforcement learning, most float32 values change in a step, but few of
the bfloat16 values that they round to.

Shape legend: K changed values of a tensor.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agentrl.distributed.dtypes import dtype_name, dtype_named
from agentrl.errors import ConfigError
from agentrl.models.checkpoint_export import atomic_weights_directory

DELTA_FILE = "delta.safetensors"
WEIGHT_DTYPES = frozenset({"bfloat16", "float16", "float32", "float64"})
_WHOLE, _POSITIONS, _VALUES = "whole/", "positions/", "values/"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POSITION_BYTES = 4
_MAX_POSITIONS = 2**31


@dataclass(frozen=True, eq=False)
class TensorChange:
    """How one tensor differs from the previous version."""

    values: torch.Tensor
    """The changed values [K], or the whole tensor."""
    positions: torch.Tensor | None = None
    """int32 [K], positions of the values in the flattened tensor; None if it is whole."""

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


@dataclass(frozen=True)
class TensorChecksum:
    """Identifies the exact values of a tensor."""

    crc: int
    """CRC-32 of its bytes."""
    dtype: str
    """Its precision in the version, such as `bfloat16`; copies in a higher precision are rounded
    back.
    """

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorChecksum":
        """Return a tensor's checksum."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        return cls(zlib.crc32(data), dtype_name(tensor.dtype))

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor holds the version's values, in the same or a higher precision."""
        dtype = dtype_named(self.dtype)
        return dtype is not None and self == TensorChecksum.of(tensor.to(dtype))


@dataclass(frozen=True, eq=False)
class WeightDelta:
    """The changes from one version to the next."""

    base: str | None
    """Label of the version that it is applied to; None if it holds every tensor whole."""
    changes: Mapping[str, TensorChange]
    checksums: Mapping[str, TensorChecksum]
    """Of all tensors of the new version, by name."""

    @property
    def num_bytes(self) -> int:
        """Size of the changes in the file."""
        return sum(change.num_bytes for change in self.changes.values())


def change_between(old: torch.Tensor | None, new: torch.Tensor) -> TensorChange | None:
    """Return how a tensor changed, bit for bit; None if it did not.

    Args:
        old: the previous version, of the same shape and dtype, contiguous; None if there is none.
        new: contiguous, on the CPU.
    """
    if old is None or new.numel() >= _MAX_POSITIONS:
        return TensorChange(new)
    bits = _BITS[new.element_size()]
    positions = (old.view(-1).view(bits) != new.view(-1).view(bits)).nonzero().view(-1)
    if not len(positions):
        return None
    if len(positions) * (_POSITION_BYTES + new.element_size()) >= new.nbytes:
        return TensorChange(new)
    return TensorChange(new.view(-1)[positions], positions.to(torch.int32))


def write_delta(delta: WeightDelta, directory: Path) -> None:
    """Write a delta; the directory appears complete or not at all.

    Raises:
        WriteError: writing failed, for example on a full disk.
    """
    tensors = {}
    for name, change in delta.changes.items():
        if change.positions is None:
            tensors[_WHOLE + name] = change.values.detach()
        else:
            tensors[_POSITIONS + name] = change.positions
            tensors[_VALUES + name] = change.values.detach()
    metadata = {
        "checksums": json.dumps({name: astuple(sum_) for name, sum_ in delta.checksums.items()})
    }
    if delta.base is not None:
        metadata["base"] = delta.base
    with atomic_weights_directory(directory) as partial:
        save_file(tensors, partial / DELTA_FILE, metadata=metadata)


def read_delta(directory: Path) -> WeightDelta:
    """Read a delta; its tensors are not checked yet.

    Raises:
        ConfigError: it is missing or malformed.
    """
    changes: dict[str, TensorChange] = {}
    try:
        with safe_open(directory / DELTA_FILE, framework="pt") as file:
            metadata = file.metadata() or {}
            checksums = {
                name: TensorChecksum(int(crc), str(dtype))
                for name, (crc, dtype) in json.loads(metadata["checksums"]).items()
            }
            for key in file.keys():  # noqa: SIM118
                kind, _, name = key.partition("/")
                if f"{kind}/" == _WHOLE:
                    changes[name] = TensorChange(file.get_tensor(key))
                elif f"{kind}/" == _VALUES:
                    positions = file.get_tensor(_POSITIONS + name)
                    changes[name] = TensorChange(file.get_tensor(key), positions)
    except (
        *(OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise ConfigError(f"{directory} holds no weight changes: {error}") from error
    kinds = {checksum.dtype for checksum in checksums.values()}
    kinds |= {dtype_name(change.values.dtype) for change in changes.values()}
    for kind in kinds - WEIGHT_DTYPES:
        raise ConfigError(f"{directory}: {kind:.40} is not a weight precision")
    return WeightDelta(metadata.get("base"), changes, checksums)
