"""Reductions over a vocabulary that is split over ranks, without gathering the logits.

Each rank passes its columns of the logits and receives the same result. Only per-position values
cross ranks, never a [C, V] tensor.

Shape legend: C positions, V this rank's part of the vocabulary, T target tokens.
"""

# ruff: noqa: N803 - shape suffixes

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agentrl.distributed.collectives import combine


class Vocabulary:
    """The ranks that hold equal, consecutive parts of the vocabulary."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        """Divide the vocabulary over the ranks of a mesh.

        Args:
            mesh: one-dimensional; None if this rank holds the whole vocabulary.
        """
        self._mesh = mesh

    def logsumexp(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return the normalizers over the whole vocabulary [C] (collective)."""
        normalizers = logits_CV.logsumexp(dim=-1)
        if self._mesh is None:
            return normalizers
        # Shift by the maximum over ranks so that no exponential overflows. The result does not
        # depend on the shift, so it needs no gradient.
        highest = normalizers.detach().clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._mesh.get_group())
        total = combine((normalizers - highest).exp(), self._mesh.get_group())
        return highest + total.log()

    def chosen(
        self, logits_CV: torch.Tensor, rows_T: torch.Tensor, targets_T: torch.Tensor
    ) -> torch.Tensor:
        """Return the logit of every target token [T] (collective)."""
        if self._mesh is None:
            return logits_CV[rows_T, targets_T]
        # Exactly one rank holds each target's logit; the others contribute 0 to the sum.
        size = logits_CV.shape[1]
        columns = targets_T - size * self._mesh.get_local_rank()
        is_local = (columns >= 0) & (columns < size)
        logits = logits_CV[rows_T, columns.clamp(0, size - 1)]
        return combine(torch.where(is_local, logits, 0.0), self._mesh.get_group())

    def sum(self, values_CV: torch.Tensor) -> torch.Tensor:
        """Return the sum over the whole vocabulary [C], without gradient (collective)."""
        total = values_CV.sum(dim=-1)
        if self._mesh is not None:
            dist.all_reduce(total, group=self._mesh.get_group())
        return total
