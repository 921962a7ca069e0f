"""What a loss needs of logits whose vocabulary is split over ranks, without making them whole.

Shape legend: C positions, V this rank's part of the vocabulary, T target tokens.
"""

# ruff: noqa: N803 - shape suffixes

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agentrl.distributed.collectives import combine


class Vocabulary:
    """The ranks that hold a part of the vocabulary each, in order and equally much."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        """Divide the vocabulary over the ranks of a mesh.

        Args:
            mesh: one-dimensional; None where one rank holds all of it.
        """
        self._mesh = mesh

    def logsumexp(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """Return the normalizers over the whole vocabulary [C] (collective)."""
        normalizers = logits_CV.logsumexp(dim=-1)
        if self._mesh is None:
            return normalizers
        highest = normalizers.detach().clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._mesh.get_group())
        total = combine((normalizers - highest).exp(), self._mesh.get_group())
        return highest + total.log()

    def chosen(
        self, logits_CV: torch.Tensor, rows_T: torch.Tensor, targets_T: torch.Tensor
    ) -> torch.Tensor:
        """Return the logit of every target token [T] (collective).

        Args:
            logits_CV: this rank's part.
            rows_T: position that predicts each target token.
            targets_T: token id of each target, in the whole vocabulary.
        """
        if self._mesh is None:
            return logits_CV[rows_T, targets_T]
        size = logits_CV.shape[1]
        places = targets_T - size * self._mesh.get_local_rank()
        here = (places >= 0) & (places < size)
        found = logits_CV[rows_T, places.clamp(0, size - 1)]
        return combine(torch.where(here, found, 0.0), self._mesh.get_group())

    def sum(self, values_CV: torch.Tensor) -> torch.Tensor:
        """Return the sum over the whole vocabulary [C], without gradient (collective)."""
        total = values_CV.sum(dim=-1)
        if self._mesh is not None:
            dist.all_reduce(total, group=self._mesh.get_group())
        return total
