"""Weights of a serving model: checks a whole checkpoint, reads it, and swaps it in."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.errors import ConfigError, InferenceError
from agentrl.models.checkpoints.checkpoint_layout import (
    checkpoint_tensors,
    is_expert,
    pieces,
    tied_names,
)
from agentrl.models.vision.image_encoders import model_class
from agentrl.models.weights import converted_model, is_converted


def check_checkpoint(path: str | Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Compare the files' headers with config.json before allocating memory.

    transformers would first initialize all tensors that are missing or have another shape, which
    takes tens of gigabytes if config.json describes a larger model.
    """
    from_config: Callable[[PretrainedConfig], PreTrainedModel] = model_class(config).from_config
    with torch.device("meta"):
        model = from_config(copy.deepcopy(config))
    places = model_places(model)
    found = set()
    try:
        files = _weight_files(path)
        if is_rearranged := _is_rearranged(files, model, places):
            files = []  # checked by transformers' loader
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if name in places or is_expert(name):
                        place_of(name, tensors.get_slice(name).get_shape(), places)
                        found.add(name)
        if not is_rearranged:
            check_complete(path, found, model)
    except (InferenceError, OSError, SafetensorError) as error:
        raise ConfigError(
            f"--model-path {path}: weights and config.json do not match: {first_line(error)}"
        ) from error
    needed, free = model.num_parameters() * dtype.itemsize, psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"--model-path {path}: the weights take {needed / 1e9:.1f} GB in --dtype "
            f"{str(dtype).removeprefix('torch.')}, and {free / 1e9:.1f} GB of memory are free"
        )


def read_weights(path: str | Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Read new weights for a model and check all of them; the model is not touched.

    They have the names of the files; tied tensors may appear under only one name.
    """
    places = model_places(model)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _stored_tensors(path, model, places):
        place_of(name, tensor.shape, places)
        if problem := not_finite(name, tensor):
            raise InferenceError(problem)
        tensors[name] = tensor
    check_complete(path, tensors.keys(), model)
    return tensors


def _stored_tensors(
    path: str | Path, model: PreTrainedModel, places: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors, under the model's names if its family rearranges them."""
    files = _weight_files(path)
    if _is_rearranged(files, model, places):
        try:
            yield from converted_model(path, model.config).state_dict().items()
        except ConfigError as error:
            raise InferenceError(str(error)) from error
        return
    yield from _tensors_of(files)


def _is_rearranged(
    files: Iterable[Path], model: PreTrainedModel, places: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether a checkpoint arranges its tensors differently from the model."""
    if not is_converted(model):
        return False
    names, tied = _names_of(files), tied_names(model)
    expected = {
        piece.name
        for name, parameter in model.named_parameters()
        if name not in tied.values()
        for piece in pieces(name, tuple(parameter.shape))
    }
    return not names <= places.keys() and not expected <= names


def _names_of(files: Iterable[Path]) -> set[str]:
    names: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names.update(tensors.keys())
        except (OSError, SafetensorError) as error:
            raise InferenceError(f"{file} cannot be read: {first_line(error)}") from error
    return names


def swap_weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Copy checked weights into the model; return the model's tensors that received them."""
    places = model_places(model)
    return [places[name].copy_(tensor) for name, tensor in tensors.items()]


def model_places(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint as views of a model's state, by name."""
    state: dict[str, torch.Tensor] = model.state_dict()
    views = (part for name, tensor in state.items() for part in checkpoint_tensors(name, tensor))
    return state | dict(views)


def place_of(name: str, shape: Sequence[int], places: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the part of a model's state that corresponds to a tensor of a checkpoint."""
    place = places.get(name)
    if place is None:
        raise InferenceError(f"the model has no tensor {name}")
    if tuple(place.shape) != tuple(shape):
        raise InferenceError(
            f"{name} has shape {tuple(shape)}, the model expects {tuple(place.shape)}"
        )
    return place


def not_finite(name: str, tensor: torch.Tensor) -> str | None:
    """Return the error text for a tensor with NaN or infinities, else None."""
    if not tensor.numel():
        return None
    # One pass without a temporary of the tensor's size; minimum and maximum propagate NaN.
    low, high = torch.aminmax(tensor)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return None
    return f"{name} has values that are not finite"


def _weight_files(path: str | Path) -> list[Path]:
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise InferenceError(f"no safetensors files in {path}")
    return files


def _tensors_of(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InferenceError(f"{file} cannot be read: {first_line(error)}") from error


def check_complete(path: str | Path, found: Collection[str], model: PreTrainedModel) -> None:
    """Check that a checkpoint has every tensor, or every expert of a stack."""
    tied = tied_names(model)
    # A tied parameter may appear in the files under any of its names.
    found_names = {tied.get(name, name) for name in found}
    for name, parameter in model.named_parameters():
        parts = [piece.name for piece in pieces(name, tuple(parameter.shape))]
        missing = sum(part not in found_names for part in parts)
        if name in found_names or not missing:
            continue
        if missing == len(parts):
            raise InferenceError(f"{path} lacks the tensor {name}")
        raise InferenceError(f"experts of {name} are missing")


def first_line(error: BaseException) -> str:
    """Return the first line of a message, because AgentRL's errors have one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
