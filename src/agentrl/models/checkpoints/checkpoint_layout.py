"""The mapping between a model's parameters and the tensors of a checkpoint.

A checkpoint stores one tensor per expert and projection. transformers 5 stacks all experts of a
layer in two parameters: `down_proj` [experts, hidden, width] and `gate_up_proj`
[experts, 2 * width, hidden], with the gate rows first. The trainer and the inference engine use this
mapping to read, export and send weights. It works on names and shapes and opens no files.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

_EXPERT = re.compile(r".+\.experts\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Box:
    """An axis-aligned box of indices within a tensor."""

    offsets: tuple[int, ...]
    """First index along each dimension."""
    shape: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection of two boxes of one tensor, or None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        shape = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, shape) if min(shape, default=1) > 0 else None

    @property
    def ends(self) -> tuple[int, ...]:
        """The exclusive end along each dimension."""
        return tuple(map(sum, zip(self.offsets, self.shape, strict=True)))

    def slices_from(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the box as slices of a tensor whose first element has the index `origin`."""
        return tuple(
            slice(offset - start, offset - start + size)
            for offset, size, start in zip(self.offsets, self.shape, origin, strict=True)
        )


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint and the box of the parameter that it fills."""

    name: str
    """Of the tensor in the checkpoint."""
    box: Box
    shape: tuple[int, ...]
    """Of the tensor in the checkpoint. An expert's tensor lacks the leading expert dimension that
    `box` has."""


def whole_piece(name: str, shape: tuple[int, ...]) -> Piece:
    """Return the piece of a parameter that a checkpoint stores as one tensor."""
    return Piece(name, Box((0,) * len(shape), shape), shape)


def pieces(name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Yield the checkpoint tensors of a parameter: itself, or one per expert of a stack."""
    owner, _, kind = name.rpartition(".experts.")
    stacked = _STACKS.get(kind)
    # A sleeping engine replaces the values of a stack by an empty one-dimensional tensor.
    if not owner or stacked is None or len(shape) != 3:
        yield whole_piece(name, shape)
        return
    num_experts, rows, columns = shape[0], shape[1] // len(stacked), shape[2]
    for expert in range(num_experts):
        for position, part in enumerate(stacked):
            yield Piece(
                f"{owner}.experts.{expert}.{part}.weight",
                Box((expert, position * rows, 0), (1, rows, columns)),
                (rows, columns),
            )


def checkpoint_tensors(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return a full parameter as checkpoint tensors with their names.

    Args:
        name: of the parameter in the transformers model.
        tensor: its values; the returned tensors are views of it.
    """
    return [
        (piece.name, tensor[piece.box.slices_from((0,) * tensor.dim())].view(piece.shape))
        for piece in pieces(name, tuple(tensor.shape))
    ]


def is_expert(name: str) -> bool:
    """Return whether a checkpoint tensor belongs to a single expert."""
    return _EXPERT.fullmatch(name) is not None


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return each alias of a tied parameter with the name under which the parameter appears first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied
