"""`WeightReceiver`: weights that come over broadcast groups, as SGLang takes them.

A manifest says what is going to come. Tensors are received straight into the model's own memory,
wherever that can be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from agentrl.distributed.broadcast import BroadcastGroup, RankAssignment, join_group
from agentrl.distributed.dtypes import dtype_named
from agentrl.errors import BroadcastError, InferenceError
from agentrl.inference.engine.weights.live_weights import model_places, not_finite, place_of

_JOIN_SECONDS = 300.0
_RECEIVE_SECONDS = 1800.0
"""What SGLang waits at most; a sender that ends closes the connection before."""


@dataclass(frozen=True)
class WeightManifest:
    """What is going to come over a group, in order."""

    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True)
class AwaitedTensor:
    """One tensor of a manifest, and where it goes."""

    name: str
    place: torch.Tensor
    """The part of the model that it is."""
    buffer: torch.Tensor
    """What it is received into: `place`, or memory of its own where the precision differs."""

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, place: torch.Tensor) -> Self:
        """Make room for a tensor where it has no place of its precision."""
        fits = place.dtype == dtype and place.is_contiguous()
        return cls(name, place, place if fits else torch.empty(place.shape, dtype=dtype))

    def settle(self) -> str | None:
        """Put what was received in its place; returns what is wrong with it, if anything."""
        if self.buffer is not self.place:
            self.place.copy_(self.buffer)
        return not_finite(self.name, self.buffer)


def awaited_tensors(manifest: WeightManifest, model: PreTrainedModel) -> list[AwaitedTensor]:
    """Return where the tensors of a manifest belong.

    Raises:
        InferenceError: the manifest makes no sense, or the model has no such tensors.
    """
    names, dtypes, shapes = manifest.names, manifest.dtypes, manifest.shapes
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise InferenceError("names, dtypes and shapes must be non-empty lists of equal length")
    places = model_places(model)
    return [
        AwaitedTensor.of(name, _dtype(name, dtype), place_of(name, shape, places))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _dtype(name: str, dtype: str) -> torch.dtype:
    found = dtype_named(str(dtype))
    if found is None:
        raise InferenceError(f"{name}: unknown dtype {dtype}")
    return found


class WeightReceiver:
    """The broadcast groups that an engine is in, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, BroadcastGroup] = {}

    async def join(self, name: str, assignment: RankAssignment) -> None:
        """Join a group; returns when all others are there.

        Raises:
            InferenceError: they did not come.
        """
        try:
            group = await join_group(assignment, name, "gloo", _JOIN_SECONDS)
        except BroadcastError as error:
            raise InferenceError(str(error)) from error
        self._groups[name] = group

    def leave(self, name: str) -> bool:
        """Leave a group; False when this engine is in none of that name."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.leave()
        return group is not None

    def check(self, name: str) -> None:
        """Check that this engine is in a group.

        Raises:
            InferenceError: it is not.
        """
        if name not in self._groups:
            raise InferenceError(f"Failed to receive weights: unknown group {name}")

    async def receive(self, name: str, awaited: Sequence[AwaitedTensor]) -> None:
        """Receive the tensors of a manifest over a group.

        Raises:
            InferenceError: they did not come, and never will over this group; or some are not
                finite.
        """
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
