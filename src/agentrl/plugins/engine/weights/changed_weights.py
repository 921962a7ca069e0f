"""Applies weight changes to a serving model: checks them, writes them, and checks the result.

Input: a delta (`agentrl.models.weight_delta`) and the model with the version that the delta is
based on. Output: the model with the new version, bit for bit, or an `InferenceError`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentrl.distributed.dtypes import dtype_name
from agentrl.errors import ConfigError, InferenceError
from agentrl.models.weight_delta import TensorChange, WeightDelta, read_delta
from agentrl.plugins.engine.weights.live_weights import (
    check_complete,
    model_places,
    not_finite,
    place_of,
)


def read_changes(path: str | Path, model: PreTrainedModel) -> WeightDelta:
    """Read a delta and check that it fits a model; the model is not touched.

    Raises:
        InferenceError: it is missing or malformed, or belongs to another model.
    """
    try:
        delta = read_delta(Path(path))
    except ConfigError as error:
        raise InferenceError(str(error)) from error
    places = model_places(model)
    for name, change in delta.changes.items():
        _check(name, change, places)
    for name in delta.checksums:
        if name not in places:
            raise InferenceError(f"the model has no tensor {name}")
    check_complete(path, delta.checksums.keys(), model)
    return delta


def check_base(delta: WeightDelta, label: str) -> None:
    """Check that a model has the version that a delta is based on.

    Raises:
        InferenceError: it has another version.
    """
    if delta.base is not None and delta.base != label:
        raise InferenceError(
            f"the changes are relative to version {delta.base}, but the weights are those of "
            f"{label}"
        )


def apply_changes(delta: WeightDelta, model: PreTrainedModel) -> list[torch.Tensor]:
    """Write checked changes into a model; return the model's tensors that have new values.

    Raises:
        InferenceError: the result is not the new version; the model's weights then belong to no
            version.
    """
    places = model_places(model)
    changed = []
    for name, change in delta.changes.items():
        place = places[name]
        if change.positions is None:
            place.copy_(change.values)
        elif place.is_contiguous():
            place.view(-1)[change.positions.long()] = change.values.to(place)
        else:
            flat = place.reshape(-1)  # a copy
            flat[change.positions.long()] = change.values.to(place)
            place.copy_(flat.view(place.shape))
        changed.append(place)
    for name, checksum in delta.checksums.items():
        if not checksum.fits(places[name].cpu()):
            raise InferenceError(
                f"{name} differs from what was published: its checksum does not match"
            )
    return changed


def _check(name: str, change: TensorChange, places: Mapping[str, torch.Tensor]) -> None:
    values, positions = change.values, change.positions
    if positions is None:
        place = place_of(name, values.shape, places)
    else:
        if name not in places:
            raise InferenceError(f"the model has no tensor {name}")
        place = places[name]
        if values.ndim != 1 or positions.shape != values.shape or positions.dtype != torch.int32:
            raise InferenceError(f"{name}: positions and values do not match")
        if not bool(((positions >= 0) & (positions < place.numel())).all()):
            raise InferenceError(f"{name}: a position is outside of the tensor")
    if torch.promote_types(values.dtype, place.dtype) != place.dtype:
        raise InferenceError(
            f"{name}: the changes are {dtype_name(values.dtype)}, but the weights are held in "
            f"{dtype_name(place.dtype)}"
        )
    if problem := not_finite(name, values):
        raise InferenceError(problem)
