"""Read a checkpoint's safetensors into a model whose parameters have shapes only so far.

The model is built, split and sharded without memory behind it (on torch's meta device). Then every
rank gives its own parts memory and reads just those out of the files: it never holds more than its
parts and one piece of one tensor.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.models.checkpoint_layout import Box, Piece, pieces, tied_names
from agentrl.models.lora import base_parameters

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# What old checkpoints hold and models compute by themselves.
_COMPUTED = ("rotary_emb.inv_freq",)


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, *, parameter_device: torch.device) -> None:
    """Give parameters that have shapes only memory, of this rank's parts; their values are none yet.

    Args:
        model: sharded or not.
        device: where buffers go, which hold their values already.
        parameter_device: where parameters go; the CPU if they are offloaded.
    """
    tied = tied_names(model)
    model._apply(
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
    tied = tied_names(model)
    aliases: dict[str, list[str]] = {}
    for name, first in tied.items():
        aliases.setdefault(first, []).append(name)
    wanted = {}
    for name, parameter in base_parameters(model):
        # A tied parameter may stand in the files under any of its names.
        names = [name, *aliases.get(name, [])]
        found = next((other for other in names if other in files.names), name)
        wanted[name] = list(pieces(found, tuple(parameter.shape)))
    _check_names(files, {piece.name for parts in wanted.values() for piece in parts}, set(tied))
    for name, parameter in base_parameters(model):
        local, box = _local_part(parameter)
        for piece in wanted[name]:
            common = box.overlap(piece.box)
            if common is not None:
                source = common.seen_from(piece.box.offsets)[-len(piece.shape) :]
                target = local[common.seen_from(box.offsets)]
                target.copy_(files.read(piece, source).view(target.shape))


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

    def read(self, piece: Piece, part: tuple[slice, ...]) -> torch.Tensor:
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


def _local_part(parameter: nn.Parameter) -> tuple[torch.Tensor, Box]:
    """Return this rank's part of a parameter and where it lies in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, Box((0,) * parameter.dim(), tuple(parameter.shape))
    shape, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), Box(tuple(offsets), tuple(shape))
