"""Read a checkpoint's safetensors into a model whose parameters have shapes only so far.

The model is built, split and sharded without memory behind it (on torch's meta device). Then every
rank gives its own parts memory and reads just those out of the files: it never holds more than its
parts and one piece of one tensor.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.models.lora import base_parameters

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# What old checkpoints hold and models compute by themselves.
_COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class _Box:
    """A rectangle of a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "_Box") -> "_Box | None":
        """Return what two boxes of one tensor have in common; None where that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        shape = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return _Box(offsets, shape) if min(shape, default=1) > 0 else None

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the first indices behind the box."""
        return tuple(map(sum, zip(self.offsets, self.shape, strict=True)))

    def seen_from(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the box as slices of something that begins at `origin`."""
        return tuple(
            slice(offset - start, offset - start + size)
            for offset, size, start in zip(self.offsets, self.shape, origin, strict=True)
        )


@dataclass(frozen=True)
class _Piece:
    """A tensor of the checkpoint and the box of the parameter that it fills."""

    name: str
    box: _Box
    shape: tuple[int, ...]
    """Its own; a dimension short where it is one of many that are stacked."""


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, *, parameter_device: torch.device) -> None:
    """Give parameters that have shapes only memory, of this rank's parts; their values are none yet.

    Args:
        model: sharded or not.
        device: where buffers go, which hold their values already.
        parameter_device: where parameters go; the CPU if they are offloaded.
    """
    tied = _tied_names(model)
    model._apply(  # type: ignore[no-untyped-call]
        lambda t: torch.empty_like(t, device=parameter_device) if t.is_meta else t.to(device)
    )
    for name, first in tied.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


@torch.no_grad()
def read_weights(model: PreTrainedModel, path: Path) -> None:
    """Fill a model's parameters from the safetensors files of a checkpoint.

    Args:
        model: its parameters have memory; of sharded ones this rank's parts are read.
        path: directory of a Hugging Face checkpoint.

    Raises:
        ConfigError: there are no weights, some are missing or too many, or have another shape than
            the configuration says.
    """
    files = _WeightFiles(path)
    tied = _tied_names(model)
    aliases: dict[str, list[str]] = {}
    for name, first in tied.items():
        aliases.setdefault(first, []).append(name)
    wanted = {}
    for name, parameter in base_parameters(model):
        # A tied parameter may stand in the files under any of its names.
        names = [name, *aliases.get(name, [])]
        found = next((other for other in names if other in files.names), name)
        wanted[name] = list(_pieces(found, tuple(parameter.shape)))
    _check_names(files, {piece.name for pieces in wanted.values() for piece in pieces}, set(tied))
    for name, parameter in base_parameters(model):
        local, box = _local_part(parameter)
        for piece in wanted[name]:
            common = box.overlap(piece.box)
            if common is not None:
                source = common.seen_from(piece.box.offsets)[-len(piece.shape) :]
                target = local[common.seen_from(box.offsets)]
                target.copy_(files.read(piece, source).view(target.shape))


def checkpoint_tensors(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return what a whole parameter is in a checkpoint: itself, or every expert of a stack.

    Args:
        name: of the parameter in the transformers model.
        tensor: its values; what is returned shares its memory.
    """
    return [
        (piece.name, tensor[piece.box.seen_from((0,) * tensor.dim())].view(piece.shape))
        for piece in _pieces(name, tuple(tensor.shape))
    ]


class _WeightFiles:
    """The safetensors files of a checkpoint; tensors are read a piece at a time."""

    def __init__(self, path: Path) -> None:
        """Find out which file holds what.

        Raises:
            ConfigError: there are no weights.
        """
        self._path = path
        if (path / _INDEX).is_file():
            places: dict[str, str] = json.loads((path / _INDEX).read_text())["weight_map"]
        elif (path / _SINGLE).is_file():
            with _opened(path / _SINGLE) as file:
                places = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise ConfigError(f"no weights in {path}: neither {_SINGLE} nor {_INDEX} is there")
        self._places = places
        self.names = places.keys()

    def read(self, piece: _Piece, part: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a tensor, in the precision of the file."""
        # Opened anew each time: pages of the file that were read count as this process's memory as
        # long as the file is open.
        with _opened(self._path / self._places[piece.name]) as file:
            values = file.get_slice(piece.name)
            shape = tuple(values.get_shape())
            if shape != piece.shape:
                raise ConfigError(
                    f"weights in {self._path} do not fit its config.json: {piece.name} has shape "
                    f"{list(shape)}, not {list(piece.shape)}"
                )
            found: torch.Tensor = values[part]
            return found

    def __str__(self) -> str:
        return str(self._path)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot load weights from {path}: {error}") from error


def _check_names(files: _WeightFiles, wanted: set[str], tied: set[str]) -> None:
    missing = sorted(wanted - files.names)
    if missing:
        raise ConfigError(f"weights are missing from {files}: {_listed(missing)}")
    left = files.names - wanted - tied
    unexpected = sorted(name for name in left if not name.endswith(_COMPUTED))
    if unexpected:
        raise ConfigError(
            f"{files} holds weights that its config.json has no place for: {_listed(unexpected)}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names of parameters that are others too, each with the name that comes first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def _pieces(name: str, shape: tuple[int, ...]) -> Iterator[_Piece]:
    """Yield what a parameter is made of in a checkpoint.

    Files hold every expert of a mixture by itself, and transformers (from 5 on) all of a layer in
    two parameters: `down_proj` [experts, hidden, width] and `gate_up_proj` [experts, 2 * width,
    hidden], the gates above.
    """
    owner, _, kind = name.rpartition(".experts.")
    stacked = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    if not owner or stacked is None:
        yield _Piece(name, _Box((0,) * len(shape), shape), shape)
        return
    num_experts, rows, columns = shape[0], shape[1] // len(stacked), shape[2]
    for expert in range(num_experts):
        for place, part in enumerate(stacked):
            yield _Piece(
                f"{owner}.experts.{expert}.{part}.weight",
                _Box((expert, place * rows, 0), (1, rows, columns)),
                (rows, columns),
            )


def _local_part(parameter: nn.Parameter) -> tuple[torch.Tensor, _Box]:
    """Return this rank's part of a parameter and where it lies in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, _Box((0,) * parameter.dim(), tuple(parameter.shape))
    shape, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), _Box(tuple(offsets), tuple(shape))
