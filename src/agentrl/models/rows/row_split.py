"""Rows whose tokens are split over ranks: context parallelism (`cp`), then sequence parallelism (`tp`).

Each `cp` rank computes one stretch of the row. Around attention, an all-to-all exchanges stretches
of tokens with all heads for all tokens with some of the heads (Jacobs et al., DeepSpeed-Ulysses,
arXiv 2309.14509). Attention sees the whole token tree and needs no change. Ring attention assumes
that a later block sees all of an earlier one, which is false for trees. `tp` splits the stretch again
between the attention and MLP blocks (Korthikanti et al., arXiv 2205.05198).

Layers whose weights every `tp` rank has compute the rank's own tokens, even if their attention or
scan follows paths: tokens are then exchanged for heads over `cp` and `tp` together.

Rows are padded to a multiple of the number of ranks; padding is cut off before attention.

Shape legend: N tokens of the row, P with padding, H query heads, K key-value heads (of this rank's
`tp` part), D head dimension, T target tokens, X heads or channels of a recurrent layer.
"""

from copy import copy
from dataclasses import replace

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad

from agentrl.data.rows import PackedRow
from agentrl.distributed.collectives import all_to_all, combine


class RowSplit:
    """The ranks that compute a row together; without a mesh, this process only."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.context = mesh["cp"] if mesh is not None and mesh["cp"].size() > 1 else None
        self.tensor = mesh["tp"] if mesh is not None and mesh["tp"].size() > 1 else None
        self.row = mesh["row"] if mesh is not None and mesh["row"].size() > 1 else None
        self.is_followed = self.row is not None
        """Whether layers need a row's layout to see the tokens of other ranks."""

    def share(self, row: PackedRow) -> "RowShare":
        """Return this rank's part of a row."""
        return RowShare(self, row)


class RowShare:
    """One rank's part of one row."""

    def __init__(self, split: RowSplit, row: PackedRow) -> None:
        self._context = split.context
        self._tensor = split.tensor
        self._row = split.row
        self._num_tokens = row.num_tokens
        self._num_targets = row.num_targets
        num_stretches = _size(self._context)
        parts = num_stretches * _size(self._tensor)
        self._num_padded = -(-row.num_tokens // parts) * parts
        length = self._num_padded // num_stretches
        self._start = length * (0 if self._context is None else self._context.get_local_rank())
        self._end = self._start + length
        # A target belongs to the rank that holds its source, whose hidden state predicts it.
        self._targets = np.flatnonzero((row.sources >= self._start) & (row.sources < self._end))

    @property
    def is_whole(self) -> bool:
        """Whether this rank computes all of the row."""
        return self._context is None and self._tensor is None

    @property
    def num_own_tokens(self) -> int:
        """How many tokens this rank computes between blocks, padding included."""
        return (self._end - self._start) // _size(self._tensor)

    @property
    def stretch(self) -> slice | None:
        """The tokens of this `cp` rank, padding included; None: all of the row."""
        return None if self._context is None else slice(self._start, self._end)

    def own(self, values: np.ndarray) -> np.ndarray:
        """Return this rank's stretch [P / cp, ...] of a row's per-token values [N, ...]."""
        padding = [(0, self._num_padded - self._num_tokens)] + [(0, 0)] * (values.ndim - 1)
        return np.pad(values, padding)[self._start : self._end]

    def between_blocks(self, values: np.ndarray) -> np.ndarray:
        """Return this `tp` rank's part of the stretch's values [P / cp, ...] between blocks."""
        if self._tensor is None:
            return values
        return np.split(values, self._tensor.size())[self._tensor.get_local_rank()]

    def of_own_tokens(self) -> "RowShare":
        """Return the share of a layer that sees this rank's own tokens between blocks."""
        share = copy(self)
        share._context = self._row
        return share

    def own_targets(self, row: PackedRow) -> PackedRow:
        """Return the row with only the targets whose sources lie in this rank's stretch."""
        if self._context is None:
            return row
        return replace(
            row,
            sources=row.sources[self._targets] - self._start,
            targets=row.targets[self._targets],
            temperatures=row.temperatures[self._targets],
        )

    def of_all_targets(self, values: torch.Tensor) -> torch.Tensor:
        """Combine each rank's values of its own targets into [T] on every rank (collective)."""
        if self._context is None:
            return values
        # Every target belongs to exactly one rank, so a sum over ranks gathers them.
        positions = torch.from_numpy(self._targets).to(values.device)
        own = values.new_zeros(self._num_targets).index_copy(0, positions, values)
        return combine(own, self._context.get_group())

    def whole_stretch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather the hidden states of the stretch that `tp` splits between blocks (collective).

        Args:
            hidden: [P / cp / tp, hidden size].
        """
        if self._tensor is None:
            return hidden
        distributed = DTensor.from_local(hidden, self._tensor, [Shard(0)], run_check=False)
        return distributed.redistribute(placements=[Replicate()]).to_local()

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange a stretch with all heads for all tokens with some of the heads (collective).

        Args:
            query: [1, H, P / cp, D].
            key: [1, K, P / cp, D].
            value: [1, K, P / cp, D].

        Returns:
            The three tensors with N tokens, H / cp query heads and max(K / cp, 1) key-value heads.
        """
        if self._context is not None:
            cp, group = self._context.size(), self._context.get_group()
            if key.shape[1] % cp:  # fewer key-value heads than ranks: ranks share a head
                repeats = cp // key.shape[1]
                key, value = (s.repeat_interleave(repeats, dim=1) for s in (key, value))
            heads = [s.shape[1] // cp for s in (query, key, value)]
            # One exchange for queries, keys and values: [cp * length, heads of one rank, D].
            parts = [s.reshape(cp, s.shape[1] // cp, *s.shape[2:]) for s in (query, key, value)]
            rows = torch.cat(parts, dim=1).transpose(1, 2)
            length = [rows.shape[1]] * cp
            whole = all_to_all(rows.flatten(0, 1), length, length, group)
            query, key, value = (s.transpose(0, 1)[None] for s in torch.split(whole, heads, dim=1))
        num_tokens = self._num_tokens
        return query[:, :, :num_tokens], key[:, :, :num_tokens], value[:, :, :num_tokens]

    def own_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Return a layer's values of all query heads [H], for the heads of `to_heads` [H / cp]."""
        if self._context is None:
            return values
        return values.chunk(self._context.size())[self._context.get_local_rank()]

    def to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Reverse `to_heads` for the attention output (collective).

        Args:
            output: [1, N, H / cp, D].

        Returns:
            [1, P / cp, H, D].
        """
        missing = self._num_padded - self._num_tokens
        if missing:
            output = pad(output, (0, 0, 0, 0, 0, missing))
        if self._context is None:
            return output
        cp = self._context.size()
        length = [self._num_padded // cp] * cp
        rows = all_to_all(output[0], length, length, self._context.get_group())
        heads = rows.reshape(cp, length[0], *rows.shape[1:]).transpose(0, 1)
        return heads.flatten(1, 2)[None]

    def to_channels(self, values: torch.Tensor) -> torch.Tensor:
        """Exchange own tokens with all heads for all tokens with some of the heads (collective).

        Args:
            values: [P / (cp * tp), X, ...] of a recurrent layer.

        Returns:
            [N, X / (cp * tp), ...]; ranks share a head if there are fewer heads than ranks.
        """
        if self._row is None:
            return values
        ranks, num_tokens = self._row.size(), len(values)
        if values.shape[1] % ranks:
            values = values.repeat_interleave(ranks // values.shape[1], dim=1)
        parts = values.unflatten(1, (ranks, -1)).movedim(1, 0).flatten(0, 1)
        length = [num_tokens] * ranks
        return all_to_all(parts, length, length, self._row.get_group())[: self._num_tokens]

    def own_channels(self, values: torch.Tensor) -> torch.Tensor:
        """Return a recurrent layer's values of all heads [X, ...], for the heads of `to_channels`."""
        if self._row is None:
            return values
        return values.chunk(self._row.size())[self._row.get_local_rank()]

    def from_channels(self, values: torch.Tensor) -> torch.Tensor:
        """Reverse `to_channels` for a layer's output [N, X / (cp * tp), ...] (collective)."""
        if self._row is None:
            return values
        ranks, missing = self._row.size(), self._num_padded - self._num_tokens
        values = pad(values, (0, 0) * (values.dim() - 1) + (0, missing))
        length = [self._num_padded // ranks] * ranks
        rows = all_to_all(values, length, length, self._row.get_group())
        heads: torch.Tensor = rows.unflatten(0, (ranks, -1)).movedim(0, 1).flatten(1, 2)
        return heads


def _size(mesh: DeviceMesh | None) -> int:
    return 1 if mesh is None else mesh.size()
