"""Forward and backward passes over rows that are too long for one pass, with exact gradients.

The row is cut into chunks in depth-first order. The first pass runs them in order without gradients
and keeps what later chunks read: keys, values and inputs of convolutions of every token, and the
recurrent states that later segments continue. The caller then computes the loss from the logprobs
of the whole row. The second pass runs the chunks in reverse order and recomputes each with what
lies above it as leaves. Its backward pass starts from two kinds of gradient: those of its logprobs,
and those of the values it created for later chunks, which these have accumulated. It adds the
gradients of what lies above it to the accumulators of earlier chunks. Reverse order makes this
exact: only a chunk itself and later chunks read what it creates.

Memory: the activations of one chunk, plus what passes between chunks and its gradients for the whole
row, a small fraction of the activations of the whole row.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from agentrl.data.rows import PackedRow, empty_row
from agentrl.data.shown_images import RowImages
from agentrl.models.chunk_states import ChunkStates, Place, TokenValues
from agentrl.models.policy import TargetLogprobs
from agentrl.models.row_tree import continued_keys


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
    continued: np.ndarray
    """int64 [I], indices in the whole row of the tokens above whose states it continues."""
    exports: np.ndarray
    """int64 [E], indices in the chunk of the tokens whose states later chunks continue."""

    @property
    def tokens(self) -> slice:
        """Return the slice of the whole row that the chunk's tokens fill."""
        return slice(self.start, self.start + self.row.num_tokens)

    @property
    def exported(self) -> np.ndarray:
        """Return the indices of `exports` in the whole row."""
        return self.exports + self.start


def cut_row(row: PackedRow, num_chunks: int) -> list[RowChunk | None]:
    """Cut a row into chunks of about the same length, and never through an image.

    The encoder produces an image as a whole, and in some families its tokens attend to one another.

    Returns:
        Exactly `num_chunks` entries. All ranks of a sharded model must make the same number of
        passes, because each pass gathers parameters; None is a pass without tokens.
    """
    edges = np.linspace(0, row.num_tokens, min(num_chunks, row.num_tokens) + 1).astype(np.int64)
    if row.images is not None:
        for start, end in row.images.spans.tolist():
            edges[(edges > start) & (edges < end)] = start
        edges = np.unique(edges)
    chunks = [
        _stretch(row, start, end)
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    read = np.unique(np.concatenate([chunk.continued for chunk in chunks]))
    cut: list[RowChunk | None] = [
        replace(chunk, exports=read[(read >= start) & (read < end)] - start)
        for chunk, start, end in zip(chunks, edges[:-1], edges[1:], strict=True)
    ]
    return cut + [None] * (num_chunks - len(chunks))


class ChunkedPass:
    """One forward and backward pass over a row, one chunk at a time.

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
        self._values: dict[Place, TokenValues] = {}
        """Values of all tokens of the row."""
        self._states: dict[Place, dict[int, torch.Tensor]] = {}
        """Recurrent states by the token of the row that they follow."""

    @torch.no_grad()
    def forward(self, *, with_entropy: bool = False) -> TargetLogprobs:
        """Return logprobs (and entropies) of all targets in the order of the row, without a graph."""
        outputs: list[TargetLogprobs] = []
        for chunk in self._chunks:
            states = self._given(chunk)
            outputs.append(self._run(chunk, states, with_entropy))
            self._keep(chunk, states)
        return self._in_order(outputs)

    def _in_order(self, outputs: Sequence[TargetLogprobs]) -> TargetLogprobs:
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
        debts = Debts(self._values, self._states)
        for chunk in reversed(self._chunks):
            given = self._given(chunk)
            for leaf in given.tensors():
                leaf.requires_grad_()
            output = self._run(chunk, given, with_entropy=False)
            if chunk is None:
                # FSDP2's hooks reduce gradients in the backward pass, a collective that the other
                # ranks wait for; the sum over no targets is 0.
                output.logprobs.sum().backward()
                continue
            targets = torch.from_numpy(chunk.targets).to(gradient.device)
            owed = [(output.logprobs, gradient.index_select(0, targets)), *debts.of(chunk, given)]
            # Without a gradient: every parameter below their layer is frozen.
            owed = [(root, debt) for root, debt in owed if root.requires_grad]
            torch.autograd.backward(
                [root for root, _ in owed], [debt.to(root.dtype) for root, debt in owed]
            )
            debts.add(chunk, given)

    def _row_of(self, chunk: RowChunk | None) -> PackedRow:
        return replace(empty_row(), stand_in=self._row.stand_in) if chunk is None else chunk.row

    def _run(
        self,
        chunk: RowChunk | None,
        states: ChunkStates,
        with_entropy: bool,
        given: torch.Tensor | None = None,
    ) -> Any:
        with self._autocast:
            return self._policy(
                self._row_of(chunk),
                chunk_size=self._chunk_size,
                with_entropy=with_entropy,
                states=states,
                given=given,
            )

    def _given(self, chunk: RowChunk | None) -> ChunkStates:
        """Return what a chunk gets from those above it.

        Copies, because the backward pass makes them leaves with gradients of their own.
        """
        if chunk is None or not len(chunk.above):
            return ChunkStates(exports=() if chunk is None else chunk.exports)
        index = torch.from_numpy(chunk.above)
        continued = {
            place: torch.stack([states[token] for token in chunk.continued.tolist()])
            for place, states in self._states.items()
            if len(chunk.continued)
        }
        return ChunkStates(
            len(chunk.above),
            above={
                place: tuple(part.index_select(2, index.to(part.device)) for part in values)
                for place, values in self._values.items()
            },
            continued=continued,
            exports=chunk.exports,
        )

    def _keep(self, chunk: RowChunk | None, states: ChunkStates) -> None:
        if chunk is None:
            return
        for place, made in states.made.items():
            if place not in self._values:
                self._values[place] = tuple(self._room_for(values) for values in made)
            for kept, new in zip(self._values[place], made, strict=True):
                kept[:, :, chunk.tokens] = new
        for place, left in states.left.items():
            self._states.setdefault(place, {}).update(
                zip(chunk.exported.tolist(), left, strict=True)
            )

    def _room_for(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_empty(*values.shape[:2], self._row.num_tokens, *values.shape[3:])


class Debts:
    """Gradients of the values that chunks created for later ones, summed in float32 or higher.

    bfloat16 has 8 bits of precision: a sum over many chunks would lose its small terms.
    """

    def __init__(
        self,
        values: Mapping[Place, TokenValues],
        states: Mapping[Place, Mapping[int, torch.Tensor]],
    ) -> None:
        self._values = {
            place: tuple(_zeros_like(part) for part in parts) for place, parts in values.items()
        }
        self._states = {
            place: {token: _zeros_like(state) for token, state in made.items()}
            for place, made in states.items()
        }

    def of(self, chunk: RowChunk, made: ChunkStates) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a chunk's values, each with its gradient from later chunks."""
        for place, values in made.made.items():
            for part, debt in zip(values, self._values[place], strict=True):
                yield part, debt[:, :, chunk.tokens]
        for place, states in made.left.items():
            debts = self._states[place]
            yield states, torch.stack([debts[token] for token in chunk.exported.tolist()])

    def add(self, chunk: RowChunk, given: ChunkStates) -> None:
        """Add the gradients of the values that a chunk received from those above it."""
        for place, values in given.above.items():
            for part, debt in zip(values, self._values[place], strict=True):
                if part.grad is not None:
                    index = torch.from_numpy(chunk.above).to(debt.device)
                    debt.index_add_(2, index, part.grad.to(debt.dtype))
        for place, states in given.continued.items():
            if states.grad is not None:
                for token, gradient in zip(chunk.continued.tolist(), states.grad, strict=True):
                    self._states[place][token] += gradient


def _stretch(row: PackedRow, start: int, end: int) -> RowChunk:
    targets = np.flatnonzero((row.sources >= start) & (row.sources < end))
    shown = [] if row.images is None else row.images.placed
    images = RowImages.of([(at - start, image) for at, image in shown if start <= at < end])
    rotary = None if row.rotary_positions is None else row.rotary_positions[:, start:end]
    part = PackedRow(
        token_ids=row.token_ids[start:end],
        positions=row.positions[start:end],
        subtree_ends=np.minimum(row.subtree_ends[start:end], end) - start,
        sources=row.sources[targets] - start,
        targets=row.targets[targets],
        temperatures=row.temperatures[targets],
        routed_experts=None if row.routed_experts is None else row.routed_experts[start:end],
        images=images,
        rotary_positions=rotary,
        stand_in=row.stand_in,
    )
    # In preorder, every earlier token that a token of the chunk can see is an ancestor of the chunk's
    # first token, so these are all the keys that the chunk needs.
    above = np.flatnonzero(row.subtree_ends[:start] > start)
    return RowChunk(
        row=part,
        start=start,
        above=above,
        targets=targets,
        continued=above[continued_keys(part, len(above))],
        exports=np.empty(0, dtype=np.int64),
    )


def _zeros_like(part: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
