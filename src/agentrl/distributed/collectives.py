"""Collectives with gradients, for activations that are spread over the ranks of a group.

`all_to_all` moves rows between ranks, and their gradients back. `combine` sums the ranks' parts of a
value that all of them then use in the same way, in the same loss: the gradient of each part equals
the gradient of the sum, so the backward pass needs no communication.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup


def all_to_all(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group
) -> torch.Tensor:
    """Send slices of rows to the ranks of a group and return the slices received (collective)."""
    moved: torch.Tensor = _AllToAll.apply(rows, list(sent), list(received), group)  # type: ignore[no-untyped-call]
    return moved


def combine(part: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of the ranks' parts, [...] on every rank of the group (collective)."""
    total: torch.Tensor = _Combine.apply(part, group)  # type: ignore[no-untyped-call]
    return total


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Group
    ) -> torch.Tensor:
        ctx.reverse = (received, sent, group)
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, *ctx.reverse), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _exchange(
    rows: torch.Tensor, sent: list[int], received: list[int], group: Group
) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
