"""Collectives with gradients, for activations that are spread over the ranks of a group.

`all_to_all` moves rows. `combine` adds up parts of something that all ranks of the group then use
in the same way, in the same loss; each therefore gets the gradient of its own part without a word
to the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup


def all_to_all(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group
) -> torch.Tensor:
    """Send stretches of rows to the ranks of a group and return what they sent (collective).

    Args:
        rows: [sum of sent, ...], the stretch for each rank in rank order.
        sent: rows for each rank.
        received: rows from each rank.
        group: the ranks.

    Returns:
        [sum of received, ...], in rank order.
    """
    moved: torch.Tensor = _AllToAll.apply(rows, list(sent), list(received), group)  # type: ignore[no-untyped-call]
    return moved


def combine(part: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of the ranks' parts, which all go on with alike (collective)."""
    total: torch.Tensor = _Combine.apply(part, group)  # type: ignore[no-untyped-call]
    return total


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Group
    ) -> torch.Tensor:
        ctx.back = (received, sent, group)
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradient, *ctx.back), None, None, None


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
