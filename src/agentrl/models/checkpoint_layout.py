"""Which tensors of a checkpoint a model's parameters are made of, and where each lies in them.

Files hold every expert of a mixture by itself, and transformers (from 5 on) all of a layer in two
parameters: `down_proj` [experts, hidden, width] and `gate_up_proj` [experts, 2 * width, hidden], the
gates above. Trainer and inference engine both read and send weights by this. Knows no files.
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
    """A rectangle of a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: "Box") -> "Box | None":
        """Return what two boxes of one tensor have in common; None where that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        shape = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, shape) if min(shape, default=1) > 0 else None

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
class Piece:
    """A tensor of the checkpoint and the box of the parameter that it fills."""

    name: str
    box: Box
    shape: tuple[int, ...]
    """Its own; a dimension short where it is one of many that are stacked."""


def pieces(name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Yield what a parameter is made of in a checkpoint: itself, or every expert of a stack."""
    owner, _, kind = name.rpartition(".experts.")
    stacked = _STACKS.get(kind)
    # A stack whose memory is released has one dimension.
    if not owner or stacked is None or len(shape) != 3:
        yield Piece(name, Box((0,) * len(shape), shape), shape)
        return
    num_experts, rows, columns = shape[0], shape[1] // len(stacked), shape[2]
    for expert in range(num_experts):
        for place, part in enumerate(stacked):
            yield Piece(
                f"{owner}.experts.{expert}.{part}.weight",
                Box((expert, place * rows, 0), (1, rows, columns)),
                (rows, columns),
            )


def checkpoint_tensors(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a checkpoint that a whole parameter is made of, by name.

    Args:
        name: of the parameter in the transformers model.
        tensor: its values; what is returned shares its memory.
    """
    return [
        (piece.name, tensor[piece.box.seen_from((0,) * tensor.dim())].view(piece.shape))
        for piece in pieces(name, tuple(tensor.shape))
    ]


def is_expert(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a part of one expert."""
    return _EXPERT.fullmatch(name) is not None


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names of parameters that are others too, each with the name that comes first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied
