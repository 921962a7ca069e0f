"""Forward and backward passes over rows that are too long for one pass, with exact gradients.

The row is cut into chunks in depth-first order. The first pass runs them in order without gradients
and keeps the keys and values of every token. The caller then computes the loss from the logprobs of
the whole row. The second pass runs the chunks in reverse order and recomputes each with the keys and
values above it as leaves. Its backward pass starts from two kinds of gradient: those of its logprobs,
and those of its own keys and values, which the later chunks have accumulated. It adds the gradients
of the keys and values above it to the accumulators of earlier chunks. Reverse order makes this exact:
a chunk's keys and values are read only by itself and by later chunks.

Memory: the activations of one chunk, plus keys, values and their gradients of the whole row, a small
fraction of the activations of the whole row.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from agentrl.data.rows import PackedRow, empty_row
from agentrl.models.attention.backend import ChunkStates
from agentrl.models.policy import TargetLogprobs

_Layer = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class RowChunk:
    """A stretch of a row, as a `PackedRow`."""

    row: PackedRow
    """The tokens at their positions in the whole row, and the targets whose source they are."""
    start: int
    """Index of its first token in the whole row."""
    above: np.ndarray
    """int64 [P], indices in the whole row of the tokens above its first token."""
    targets: np.ndarray
    """int64, indices of its targets in the whole row."""

    @property
    def tokens(self) -> slice:
        """Return the slice of the whole row that the chunk's tokens fill."""
        return slice(self.start, self.start + self.row.num_tokens)


def cut_row(row: PackedRow, num_chunks: int) -> list[RowChunk | None]:
    """Cut a row into chunks whose lengths differ by one token at most.

    Returns:
        Exactly `num_chunks` entries. All ranks of a sharded model must make the same number of
        passes, because each pass gathers parameters; None is a pass without tokens.
    """
    edges = np.linspace(0, row.num_tokens, min(num_chunks, row.num_tokens) + 1).astype(np.int64)
    chunks: list[RowChunk | None] = [
        _stretch(row, start, end)
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    return chunks + [None] * (num_chunks - len(chunks))


class ChunkedPass:
    """One forward and backward pass over a row, a chunk at a time.

    Example:
        passes = ChunkedPass(policy, row, num_chunks=4)
        output = passes.forward()
        loss(output.logprobs.requires_grad_()).backward()
        passes.backward(output.logprobs.grad)
    """

    def __init__(
        self,
        policy: nn.Module,
        row: PackedRow,
        *,
        num_chunks: int,
        chunk_size: int = 4096,
        autocast: AbstractContextManager[object] | None = None,
    ) -> None:
        """Cut the row.

        Args:
            policy: a `PolicyModel` with tree attention; it may be sharded.
            row: N tokens, T target tokens.
            num_chunks: number of forward passes and of backward passes; equal on all ranks.
            chunk_size: positions that go through the LM head at a time.
            autocast: context of every forward pass.
        """
        self._autocast = autocast if autocast is not None else nullcontext()
        self._policy = policy
        self._row = row
        self._chunks = cut_row(row, num_chunks)
        self._chunk_size = chunk_size
        self._layers: list[_Layer] = []

    @torch.no_grad()
    def forward(self, *, with_entropy: bool = False) -> TargetLogprobs:
        """Return logprobs (and entropies) of all targets in the order of the row, without a graph."""
        outputs = []
        for chunk in self._chunks:
            states = ChunkStates(self._above(chunk))
            outputs.append(self._run(chunk, states, with_entropy))
            if chunk is not None:
                self._keep(chunk, states)
        # Chunks hold targets in the order of their sources; `back` restores the order of the row.
        order = np.concatenate([chunk.targets for chunk in self._chunks if chunk is not None])
        device = outputs[0].logprobs.device
        back = torch.from_numpy(np.argsort(order, kind="stable")).to(device)
        entropies = [output.entropies for output in outputs if output.entropies is not None]
        return TargetLogprobs(
            logprobs=torch.cat([output.logprobs for output in outputs]).index_select(0, back),
            entropies=torch.cat(entropies).index_select(0, back) if entropies else None,
        )

    def backward(self, gradient: torch.Tensor) -> None:
        """Accumulate the gradients of the parameters.

        Args:
            gradient: [T], derivative of the loss with respect to each logprob that `forward`
                returned.
        """
        debts = [tuple(_accumulator(states) for states in layer) for layer in self._layers]
        for chunk in reversed(self._chunks):
            above = self._above(chunk)
            for states in (states for layer in above for states in layer):
                states.requires_grad_()
            shared = ChunkStates(above)
            output = self._run(chunk, shared, with_entropy=False)
            if chunk is None:
                # FSDP2's hooks reduce gradients in the backward pass, a collective that the other
                # ranks wait for; the sum over no targets is 0.
                output.logprobs.sum().backward()
                continue
            targets = torch.from_numpy(chunk.targets).to(gradient.device)
            roots, gradients = [output.logprobs], [gradient.index_select(0, targets)]
            for layer, made in sorted(shared.made.items()):
                for states, debt in zip(made, debts[layer], strict=True):
                    if not states.requires_grad:  # every parameter below this layer is frozen
                        continue
                    roots.append(states)
                    gradients.append(debt[:, :, chunk.tokens].to(states.dtype))
            torch.autograd.backward(roots, gradients)
            index = torch.from_numpy(chunk.above).to(gradient.device)
            for layer_above, layer_debts in zip(above, debts, strict=False):
                for states, debt in zip(layer_above, layer_debts, strict=True):
                    assert states.grad is not None, "a chunk attends to all of the path above it"
                    debt.index_add_(2, index, states.grad.to(debt.dtype))

    def _run(
        self, chunk: RowChunk | None, states: ChunkStates, with_entropy: bool
    ) -> TargetLogprobs:
        with self._autocast:
            output: TargetLogprobs = self._policy(
                empty_row() if chunk is None else chunk.row,
                chunk_size=self._chunk_size,
                with_entropy=with_entropy,
                states=states,
                num_above=0 if chunk is None else len(chunk.above),
            )
        return output

    def _above(self, chunk: RowChunk | None) -> Sequence[_Layer]:
        """Return copies of the keys and values above a chunk, a pair per layer.

        Copies, because the backward pass makes them leaves with gradients of their own.
        """
        if chunk is None or not len(chunk.above):
            return ()
        index = torch.from_numpy(chunk.above).to(self._layers[0][0].device)
        return [(k.index_select(2, index), v.index_select(2, index)) for k, v in self._layers]

    def _keep(self, chunk: RowChunk, states: ChunkStates) -> None:
        if not self._layers:
            self._layers = [
                (self._room_for(key), self._room_for(value))
                for _, (key, value) in sorted(states.made.items())
            ]
        for layer, made in states.made.items():
            for kept, new in zip(self._layers[layer], made, strict=True):
                kept[:, :, chunk.tokens] = new

    def _room_for(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_empty(1, states.shape[1], self._row.num_tokens, states.shape[3])


def _stretch(row: PackedRow, start: int, end: int) -> RowChunk:
    targets = np.flatnonzero((row.sources >= start) & (row.sources < end))
    return RowChunk(
        row=PackedRow(
            token_ids=row.token_ids[start:end],
            positions=row.positions[start:end],
            subtree_ends=np.minimum(row.subtree_ends[start:end], end) - start,
            sources=row.sources[targets] - start,
            targets=row.targets[targets],
            temperatures=row.temperatures[targets],
            routed_experts=None if row.routed_experts is None else row.routed_experts[start:end],
        ),
        start=start,
        # In preorder, every earlier token that a token of the chunk can see is an ancestor of the
        # chunk's first token, so these are all the keys that the chunk needs.
        above=np.flatnonzero(row.subtree_ends[:start] > start),
        targets=targets,
    )


def _accumulator(states: torch.Tensor) -> torch.Tensor:
    """Return zeros for summing gradients, in float32 or higher.

    bfloat16 has 8 bits of precision: a sum over many chunks would lose its small terms.
    """
    return torch.zeros_like(states, dtype=torch.promote_types(states.dtype, torch.float32))
