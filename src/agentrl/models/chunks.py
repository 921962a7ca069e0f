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
row (`models.rows.chunk_states`), which may be kept in host memory.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from agentrl.data.rows import PackedRow, empty_row
from agentrl.models.policy import TargetLogprobs
from agentrl.models.rows.chunk_states import ChunkStates, RowStates
from agentrl.models.rows.row_chunks import RowChunk, cut_row


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
        states_device: torch.device | None = None,
    ) -> None:
        """Cut the row.

        Args:
            policy: a `PolicyModel` with tree attention; it may be sharded.
            row: N tokens, T target tokens.
            num_chunks: number of forward passes and of backward passes; equal on all ranks.
            chunk_size: positions that go through the LM head at a time.
            autocast: context of every forward pass.
            states_device: where what passes between chunks is kept; None: where they are computed.
        """
        self._autocast = autocast if autocast is not None else nullcontext()
        self._policy = policy
        self._row = row
        self._chunks = cut_row(row, num_chunks)
        self._chunk_size = chunk_size
        self._states = RowStates(row.num_tokens, states_device)

    @torch.no_grad()
    def forward(self, *, with_entropy: bool = False) -> TargetLogprobs:
        """Return logprobs (and entropies) of all targets in the order of the row, without a graph."""
        outputs: list[TargetLogprobs] = []
        for chunk in self._chunks:
            states = self._states_of(chunk)
            outputs.append(self._run(chunk, states, with_entropy))
            if states is not None:
                self._states.store(states)
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
        self._states.start_backward()
        for chunk in reversed(self._chunks):
            self._backward(chunk, gradient)

    def _backward(self, chunk: RowChunk | None, gradient: torch.Tensor) -> None:
        states = self._states_of(chunk)
        output = self._run(chunk, states, with_entropy=False)
        if states is None:
            # FSDP2's hooks reduce gradients in the backward pass, a collective that the other
            # ranks wait for; the sum over no targets is 0.
            output.logprobs.sum().backward()
            return
        targets = torch.from_numpy(states.chunk.targets).to(gradient.device)
        roots = [output.logprobs, *states.created()]
        incoming = [gradient.index_select(0, targets), *self._states.gradients(states)]
        # A root does not require a gradient if all parameters below its layer are frozen.
        needed = [number for number, root in enumerate(roots) if root.requires_grad]
        torch.autograd.backward(
            [roots[number] for number in needed], [incoming[number] for number in needed]
        )

    def _row_of(self, chunk: RowChunk | None) -> PackedRow:
        return replace(empty_row(), stand_in=self._row.stand_in) if chunk is None else chunk.row

    def _run(
        self,
        chunk: RowChunk | None,
        states: ChunkStates | None,
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

    def _states_of(self, chunk: RowChunk | None) -> ChunkStates | None:
        return None if chunk is None else ChunkStates(self._states, chunk)
