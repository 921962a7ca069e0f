"""Where weights that are announced arrive: in the model's own memory, wherever that can be."""

from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from agentrl.errors import InferenceError
from agentrl.inference.engine.weights.live_weights import not_finite, place_of


@dataclass(frozen=True)
class Announced:
    """What is going to come over a group, in order."""

    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True)
class Landing:
    """One tensor that is awaited."""

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
        """Put what has come in its place; returns what is wrong with it, if anything."""
        if self.buffer is not self.place:
            self.place.copy_(self.buffer)
        return not_finite(self.name, self.buffer)


def landings(announced: Announced, model: PreTrainedModel) -> list[Landing]:
    """Return where the announced tensors belong.

    Raises:
        InferenceError: the announcement makes no sense, or the model has no such tensors.
    """
    names, dtypes, shapes = announced.names, announced.dtypes, announced.shapes
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise InferenceError("names, dtypes and shapes have to be lists of one length above 0")
    state = model.state_dict()
    return [
        Landing.of(name, _dtype(name, dtype), place_of(name, shape, state))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]


def _dtype(name: str, dtype: str) -> torch.dtype:
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise InferenceError(f"{name}: there is no dtype {dtype}")
    return found
