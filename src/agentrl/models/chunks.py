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
from agentrl.models.policy import TargetLogprobs
from agentrl.models.rows.chunk_states import ChunkStates, LayerKey, TokenValues
from agentrl.models.rows.row_tree import continued_keys


@dataclass(frozen=True, eq=False)
class RowChunk:
    """A part of a row, as a `PackedRow`."""

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
        _chunk(row, start, end)
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    exports = np.unique(np.concatenate([chunk.continued for chunk in chunks]))
    cut: list[RowChunk | None] = [
        replace(chunk, exports=exports[(exports >= start) & (exports < end)] - start)
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
        self._values: dict[LayerKey, TokenValues] = {}
        """Values of all tokens of the row."""
        self._states: dict[LayerKey, dict[int, torch.Tensor]] = {}
        """Recurrent states by the token of the row that they follow."""

    @torch.no_grad()
    def forward(self, *, with_entropy: bool = False) -> TargetLogprobs:
        """Return logprobs (and entropies) of all targets in the order of the row, without a graph."""
        outputs: list[TargetLogprobs] = []
        for chunk in self._chunks:
            states = self._received(chunk)
            outputs.append(self._run(chunk, states, with_entropy))
            self._store(chunk, states)
        return self._in_row_order(outputs)

    def _in_row_order(self, outputs: Sequence[TargetLogprobs]) -> TargetLogprobs:
        # Chunks have targets in the order of their sources; `inverse` restores the order of the row.
        order = np.concatenate([chunk.targets for chunk in self._chunks if chunk is not None])
        device = outputs[0].logprobs.device
        inverse = torch.from_numpy(np.argsort(order, kind="stable")).to(device)
        entropies = [output.entropies for output in outputs if output.entropies is not None]
        return TargetLogprobs(
            logprobs=torch.cat([output.logprobs for output in outputs]).index_select(0, inverse),
            entropies=torch.cat(entropies).index_select(0, inverse) if entropies else None,
        )

    def backward(self, gradient: torch.Tensor) -> None:
        """Accumulate the gradients of the parameters.

        Args:
            gradient: [T], derivative of the loss with respect to each logprob that `forward`
                returned.
        """
        pending = PendingGradients(self._values, self._states)
        for chunk in reversed(self._chunks):
            received = self._received(chunk)
            for leaf in received.tensors():
                leaf.requires_grad_()
            output = self._run(chunk, received, with_entropy=False)
            if chunk is None:
                # FSDP2's hooks reduce gradients in the backward pass, a collective that the other
                # ranks wait for; the sum over no targets is 0.
                output.logprobs.sum().backward()
                continue
            targets = torch.from_numpy(chunk.targets).to(gradient.device)
            pairs = [
                (output.logprobs, gradient.index_select(0, targets)),
                *pending.of(chunk, received),
            ]
            # A root does not require a gradient if all parameters below its layer are frozen.
            pairs = [(root, incoming) for root, incoming in pairs if root.requires_grad]
            torch.autograd.backward(
                [root for root, _ in pairs], [incoming.to(root.dtype) for root, incoming in pairs]
            )
            pending.add(chunk, received)

    def _row_of(self, chunk: RowChunk | None) -> PackedRow:
        return replace(empty_row(), stand_in=self._row.stand_in) if chunk is None else chunk.row

    def _run(
        self,
        chunk: RowChunk | None,
        states: ChunkStates,
        with_entropy: bool,
        stage_input: torch.Tensor | None = None,
    ) -> Any:
        with self._autocast:
            return self._policy(
                self._row_of(chunk),
                chunk_size=self._chunk_size,
                with_entropy=with_entropy,
                states=states,
                stage_input=stage_input,
            )

    def _received(self, chunk: RowChunk | None) -> ChunkStates:
        """Return the values that a chunk receives from those above it.

        They are copies, because the backward pass makes them leaves with gradients of their own.
        """
        if chunk is None or not len(chunk.above):
            return ChunkStates(exports=() if chunk is None else chunk.exports)
        index = torch.from_numpy(chunk.above)
        continued = {
            layer: torch.stack([states[token] for token in chunk.continued.tolist()])
            for layer, states in self._states.items()
            if len(chunk.continued)
        }
        return ChunkStates(
            len(chunk.above),
            above={
                layer: tuple(part.index_select(2, index.to(part.device)) for part in values)
                for layer, values in self._values.items()
            },
            continued=continued,
            exports=chunk.exports,
        )

    def _store(self, chunk: RowChunk | None, states: ChunkStates) -> None:
        if chunk is None:
            return
        for layer, created in states.created.items():
            if layer not in self._values:
                self._values[layer] = tuple(self._buffer_for(values) for values in created)
            for kept, new in zip(self._values[layer], created, strict=True):
                kept[:, :, chunk.tokens] = new
        for layer, exported in states.exported_states.items():
            self._states.setdefault(layer, {}).update(
                zip(chunk.exported.tolist(), exported, strict=True)
            )

    def _buffer_for(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_empty(*values.shape[:2], self._row.num_tokens, *values.shape[3:])


class PendingGradients:
    """Gradients of the values that chunks created for later ones, summed in float32 or higher.

    bfloat16 has 8 bits of precision: a sum over many chunks would lose its small terms.
    """

    def __init__(
        self,
        values: Mapping[LayerKey, TokenValues],
        states: Mapping[LayerKey, Mapping[int, torch.Tensor]],
    ) -> None:
        self._values = {
            layer: tuple(_zeros_like(part) for part in parts) for layer, parts in values.items()
        }
        self._states = {
            layer: {token: _zeros_like(state) for token, state in by_token.items()}
            for layer, by_token in states.items()
        }

    def of(
        self, chunk: RowChunk, states: ChunkStates
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a chunk's values, each with its gradient from later chunks."""
        for layer, values in states.created.items():
            for part, total in zip(values, self._values[layer], strict=True):
                yield part, total[:, :, chunk.tokens]
        for layer, exported in states.exported_states.items():
            totals = self._states[layer]
            yield exported, torch.stack([totals[token] for token in chunk.exported.tolist()])

    def add(self, chunk: RowChunk, received: ChunkStates) -> None:
        """Add the gradients of the values that a chunk received from those above it."""
        for layer, values in received.above.items():
            for part, total in zip(values, self._values[layer], strict=True):
                if part.grad is not None:
                    index = torch.from_numpy(chunk.above).to(total.device)
                    total.index_add_(2, index, part.grad.to(total.dtype))
        for layer, states in received.continued.items():
            if states.grad is not None:
                for token, gradient in zip(chunk.continued.tolist(), states.grad, strict=True):
                    self._states[layer][token] += gradient


def _chunk(row: PackedRow, start: int, end: int) -> RowChunk:
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
