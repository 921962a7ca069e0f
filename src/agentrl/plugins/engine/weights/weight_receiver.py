"""`WeightReceiver`: receives weights over broadcast groups, as SGLang does.

A manifest announces the tensors. They are received directly into the model's memory where possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from agentrl.distributed.broadcast import BroadcastGroup, RankAssignment, join_group
from agentrl.distributed.dtypes import dtype_named
from agentrl.errors import BroadcastError, InferenceError
from agentrl.plugins.engine.weights.live_weights import model_places, not_finite, place_of

_JOIN_SECONDS = 300.0
_RECEIVE_SECONDS = 1800.0
"""SGLang's own timeout; a sender that exits closes the connection earlier."""


@dataclass(frozen=True)
class WeightManifest:
    """The tensors that will arrive over a group, in order."""

    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True)
class AwaitedTensor:
    """One tensor of a manifest, and its destination."""

    name: str
    place: torch.Tensor
    """The part of the model that it belongs to."""
    buffer: torch.Tensor
    """Receive buffer: `place`, or memory of the host if the precision or the device differs."""

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, place: torch.Tensor) -> Self:
        """Return the destination of a tensor, with a buffer if precision or device differ."""
        is_direct = place.dtype == dtype and place.is_contiguous() and place.is_cpu
        return cls(name, place, place if is_direct else torch.empty(place.shape, dtype=dtype))

    def settle(self) -> str | None:
        """Copy the received values to their place; return the error, if any."""
        if self.buffer is not self.place:
            self.place.copy_(self.buffer)
        return not_finite(self.name, self.buffer)


def awaited_tensors(manifest: WeightManifest, model: PreTrainedModel) -> list[AwaitedTensor]:
    """Return the destinations of a manifest's tensors."""
    names, dtypes, shapes = manifest.names, manifest.dtypes, manifest.shapes
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise InferenceError("names, dtypes and shapes must be non-empty lists of equal length")
    places = model_places(model)
    return [
        AwaitedTensor.of(name, _dtype(name, dtype), place_of(name, shape, places))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _dtype(name: str, dtype: str) -> torch.dtype:
    parsed = dtype_named(str(dtype))
    if parsed is None:
        raise InferenceError(f"{name}: unknown dtype {dtype}")
    return parsed


class WeightReceiver:
    """The broadcast groups that an engine is in, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, BroadcastGroup] = {}

    async def join(self, name: str, assignment: RankAssignment) -> None:
        """Join a group; return when all ranks have joined."""
        try:
            group = await join_group(assignment, name, "gloo", _JOIN_SECONDS)
        except BroadcastError as error:
            raise InferenceError(str(error)) from error
        self._groups[name] = group

    def leave(self, name: str) -> bool:
        """Leave a group; return False if this engine is in no group of that name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.leave()
        return group is not None

    def check(self, name: str) -> None:
        """Raise an `InferenceError` unless this engine is in a group."""
        if name not in self._groups:
            raise InferenceError(f"Failed to receive weights: unknown group {name}")

    async def receive(self, name: str, awaited: Sequence[AwaitedTensor]) -> None:
        """Receive the tensors of a manifest over a group."""
        self.check(name)
        problems: list[str] = []

        def arrived(number: int) -> None:
            problem = awaited[number].settle()
            if problem is not None:
                problems.append(problem)

        buffers = [tensor.buffer for tensor in awaited]
        try:
            await self._groups[name].broadcast(buffers, _RECEIVE_SECONDS, arrived)
        except BroadcastError as error:
            self._groups[name].leave()
            raise InferenceError(f"Failed to receive weights: {error}") from error
        if problems:
            raise InferenceError(problems[0])
