"""Reads a checkpoint's safetensors into a model on torch's meta device.

The model is built, split and sharded without memory. Each rank then allocates its own shards and
reads them from the files: its memory never exceeds its shards plus one piece of one tensor.
"""

import copy
import json
import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from agentrl.errors import ConfigError
from agentrl.models.checkpoints.checkpoint_layout import Box, Piece, pieces, tied_names, whole_piece
from agentrl.models.lora import base_parameters
from agentrl.models.vision.image_encoders import model_class

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

log = logging.getLogger(__name__)
# Heads that predict further tokens: in separate modules, or as layers after the last one.
_FURTHER_TOKENS = re.compile(r"(?:^|\.)mtp(?:\.|_)")
_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")
# Tensors of old checkpoints that models now compute.
_COMPUTED_BUFFERS = ("rotary_emb.inv_freq",)


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, *, parameter_device: torch.device) -> None:
    """Allocate this rank's shards of the parameters, without values, and move the buffers.

    Args:
        model: sharded or not.
        device: destination of the buffers, whose values are computed already.
        parameter_device: destination of the parameters; the CPU if they are offloaded.
    """
    # `_apply` replaces each meta parameter on its own, which would untie tied ones.
    tied = tied_names(model)
    model._apply(
        lambda t: torch.empty_like(t, device=parameter_device) if t.is_meta else t.to(device)
    )
    for name, first in tied.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


@torch.no_grad()
def read_weights(
    model: PreTrainedModel, path: Path, *, has: Callable[[str], bool] = lambda _: True
) -> None:
    """Fill a model's parameters, and the buffers that checkpoints hold, from safetensors files.

    Args:
        model: its parameters are allocated; this rank reads only its shards.
        path: directory of a Hugging Face checkpoint.
        has: whether a tensor, by its name, belongs to this part of the model.
    """
    files = _WeightFiles(path)
    tied = tied_names(model)
    aliases: dict[str, list[str]] = {}
    for name, first in tied.items():
        aliases.setdefault(first, []).append(name)
    wanted = {}
    for name, parameter in base_parameters(model):
        # Checkpoints store a tied parameter under any one of its names.
        names = [name, *aliases.get(name, [])]
        stored = next((other for other in names if other in files.names), name)
        shape = tuple(parameter.shape)
        is_whole = stored in files.names  # some families store stacks of experts unchanged
        wanted[name] = [whole_piece(stored, shape)] if is_whole else list(pieces(stored, shape))
    buffers = _stored_buffers(model)
    expected = {piece.name for parts in wanted.values() for piece in parts} | buffers.keys()
    if not expected <= files.names and is_converted(model):
        _copy_converted(model, path)
        return
    _check_missing(files, expected)
    remaining = filter(has, files.names - expected - set(tied))
    _check_unexpected(
        model, path, [name for name in remaining if not name.endswith(_COMPUTED_BUFFERS)]
    )
    for name, buffer in buffers.items():
        piece = whole_piece(name, tuple(buffer.shape))
        buffer.copy_(files.read(piece, (slice(None),) * buffer.dim()))
    for name, parameter in base_parameters(model):
        local, box = _local_part(parameter)
        for piece in wanted[name]:
            overlap = box.overlap(piece.box)
            if overlap is not None:
                source = overlap.slices_from(piece.box.offsets)[-len(piece.shape) :]
                target = local[overlap.slices_from(box.offsets)]
                target.copy_(files.read(piece, source).view(target.shape))


def _stored_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a checkpoint, such as a router's correction, by name."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def is_converted(model: PreTrainedModel) -> bool:
    """Return whether a family's checkpoints may have another layout than its models."""
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def converted_model(path: str | Path, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with a checkpoint's weights, in their precision, through transformers' loader.

    The loader knows the layouts of all families, but reads whole models into host memory.
    """
    try:
        loaded: Any = model_class(config).from_pretrained(
            path, config=copy.deepcopy(config), dtype="auto", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load weights from {path}: {error}") from error
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    _check_unexpected(model, Path(path), info["unexpected_keys"])
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info[problem])
        if names:
            raise ConfigError(
                f"weights in {path} do not match its config.json: {problem.replace('_', ' ')} "
                f"{_join_names(names)}"
            )
    return model


def _copy_converted(model: PreTrainedModel, path: Path) -> None:
    values = converted_model(path, model.config).state_dict()
    for name, parameter in base_parameters(model):
        local, box = _local_part(parameter)
        local.copy_(values[name][box.slices_from((0,) * len(box.shape))])
    for name, buffer in _stored_buffers(model).items():
        buffer.copy_(values[name])


class _WeightFiles:
    """The safetensors files of a checkpoint, read one piece of a tensor at a time."""

    def __init__(self, path: Path) -> None:
        """Read the index from tensor names to files."""
        self._path = path
        if (path / _INDEX).is_file():
            file_of: dict[str, str] = json.loads((path / _INDEX).read_text())["weight_map"]
        elif (path / _SINGLE).is_file():
            with _open(path / _SINGLE) as file:
                file_of = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise ConfigError(f"no weights in {path}: {_SINGLE} and {_INDEX} are both missing")
        self._file_of = file_of
        self.names = file_of.keys()

    def read(self, piece: Piece, part: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a tensor, in the precision of the file."""
        # Opened for each piece: safetensors maps the file, and pages that were read count as this
        # process's memory while it is open.
        with _open(self._path / self._file_of[piece.name]) as file:
            values = file.get_slice(piece.name)
            shape = tuple(values.get_shape())
            if shape != piece.shape:
                raise ConfigError(
                    f"weights in {self._path} do not match its config.json: {piece.name} has shape "
                    f"{list(shape)} instead of {list(piece.shape)}"
                )
            found: torch.Tensor = values[part]
            return found

    def __str__(self) -> str:
        return str(self._path)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot load weights from {path}: {error}") from error


def _check_missing(files: _WeightFiles, wanted: set[str]) -> None:
    missing = sorted(wanted - files.names)
    if missing:
        raise ConfigError(f"weights are missing from {files}: {_join_names(missing)}")


def _check_unexpected(model: PreTrainedModel, path: Path, names: Collection[str]) -> None:
    """Refuse tensors that the model has no place for, except heads that predict further tokens.

    Many families are published with such heads, which servers use to draft tokens. transformers'
    models have none.
    """
    config = model.config.get_text_config()
    first = getattr(config, "num_hidden_layers", 0)
    extra_layers = range(first, first + (getattr(config, "num_nextn_predict_layers", 0) or 0))
    # Names from its class, and those that its configuration adds (Gemma 4's shared keys).
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()

    def is_ignored(name: str) -> bool:
        layer = _LAYER.match(name)
        if _FURTHER_TOKENS.search(name) or (layer is not None and int(layer[1]) in extra_layers):
            return True
        return any(re.search(pattern, name) for pattern in patterns)

    ignored = [name for name in sorted(map(str, names)) if is_ignored(name)]
    unexpected = sorted({*map(str, names)} - {*ignored})
    if unexpected:
        raise ConfigError(
            f"{path} has weights that its config.json does not describe: {_join_names(unexpected)}"
        )
    if ignored:
        log.warning(
            "%s: the model has no place for %s (usually heads that predict further tokens): they "
            "are neither trained nor exported",
            path,
            _join_names(ignored),
        )


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _local_part(parameter: nn.Parameter) -> tuple[torch.Tensor, Box]:
    """Return this rank's shard of a parameter and its box within the full parameter."""
    if not isinstance(parameter, DTensor):
        return parameter, Box((0,) * parameter.dim(), tuple(parameter.shape))
    shape, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), Box(tuple(offsets), tuple(shape))
