"""Passes rows through the stages of a pipeline, forward and backward.

A row within the budget is one pass. A row in chunks is a separate pipeline whose rows are the
chunks: forward in order, then backward in reverse order, as `ChunkedPass` does on one rank. Each
stage keeps what passes between chunks in its own layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any

import torch
from torch import nn

from agentrl.data.rows import PackedRow
from agentrl.distributed import Stages
from agentrl.models.policy import ChunkedPass, TargetLogprobs
from agentrl.models.rows.row_split import RowSplit

RowLoss = Callable[[int, torch.Tensor], torch.Tensor]
"""Returns the loss of a row from its number and the logprobs of its targets."""


class StagedRows:
    """Rows that fit into one pass each."""

    def __init__(
        self,
        policy: nn.Module,
        rows: Sequence[PackedRow],
        stages: Stages,
        split: RowSplit,
        *,
        chunk_size: int = 4096,
        with_entropy: bool = False,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Name the rows.

        Args:
            policy: a stage of a `PolicyModel`, or its `BasePolicy`.
            rows: of this share, equal on all stages.
            stages: of the pipeline.
            split: how rows are split over further ranks.
            chunk_size: positions that go through the LM head at a time.
            with_entropy: also compute entropies.
            around: context of every forward pass.
        """
        self._policy, self._rows, self._stages = policy, rows, stages
        self._lengths = [split.share(row).num_own_tokens for row in rows]
        self._options: dict[str, Any] = {"chunk_size": chunk_size, "with_entropy": with_entropy}
        self._around = around
        self.outputs: dict[int, TargetLogprobs] = {}
        """The last stage's outputs for each row, without a graph; empty on other stages."""

    def forward(self) -> None:
        """Pass all rows forward (collective)."""
        self._stages.forward(self._lengths, self._compute)

    def forward_backward(self, loss: RowLoss) -> None:
        """Pass all rows forward and gradients back (collective)."""
        self._stages.forward_backward(self._lengths, self._compute, loss)

    def _compute(self, number: int, stage_input: torch.Tensor | None) -> torch.Tensor:
        with self._around():
            outputs = self._policy(self._rows[number], stage_input=stage_input, **self._options)
        return _record(self.outputs, number, outputs)


class StagedChunks(ChunkedPass):
    """One row that is computed in chunks."""

    def __init__(
        self,
        policy: nn.Module,
        row: PackedRow,
        stages: Stages,
        split: RowSplit,
        *,
        num_chunks: int,
        chunk_size: int = 4096,
        states_device: torch.device | None = None,
    ) -> None:
        """Cut the row, into at least as many chunks as there are stages.

        Args:
            policy: see `StagedRows`.
            row: N tokens, T target tokens.
            stages: of the pipeline.
            split: how rows are split over further ranks.
            num_chunks: number that the budget requires; equal on all ranks.
            chunk_size: positions that go through the LM head at a time.
            states_device: where what passes between chunks is kept; None: where it is computed.
        """
        super().__init__(
            policy,
            row,
            num_chunks=max(num_chunks, stages.count),
            chunk_size=chunk_size,
            states_device=states_device,
        )
        self._stages = stages
        self._lengths = [split.share(self._row_of(c)).num_own_tokens for c in self._chunks]

    def forward_staged(self, *, with_entropy: bool = False) -> TargetLogprobs | None:
        """Return logprobs (and entropies) of all targets on the last stage (collective)."""
        outputs: dict[int, TargetLogprobs] = {}

        def compute(number: int, stage_input: torch.Tensor | None) -> torch.Tensor:
            chunk = self._chunks[number]
            states = self._states_of(chunk)
            output = self._run(chunk, states, with_entropy, stage_input)
            if states is not None:
                self._states.store(states)
            return _record(outputs, number, output)

        self._stages.forward(self._lengths, compute)
        return (
            self._in_row_order([outputs[number] for number in sorted(outputs)]) if outputs else None
        )

    def backward_staged(
        self, gradient: torch.Tensor | None, around: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Accumulate the gradients of the parameters (collective).

        Args:
            gradient: [T], derivative of the loss with respect to each logprob; None on stages other
                than the last.
            around: context of every forward pass.
        """
        self._states.start_backward()
        chunks = self._chunks[::-1]

        def compute(number: int, stage_input: torch.Tensor | None) -> torch.Tensor:
            states = self._states_of(chunks[number])
            with around():
                result = self._run(chunks[number], states, False, stage_input)
            outputs = result.logprobs if isinstance(result, TargetLogprobs) else result
            if states is None:
                return outputs

            created = list(states.created())
            needed = [part.requires_grad for part in created]

            def incoming() -> Iterator[torch.Tensor]:
                # A stage's backward passes are in this order: all gradients from later chunks have
                # been computed.
                return compress(self._states.gradients(states), needed)

            parts = compress(created, needed)
            output: torch.Tensor = _WithPending.apply(incoming, outputs, *parts)  # type: ignore[no-untyped-call]
            return output

        def loss(number: int, logprobs: torch.Tensor) -> torch.Tensor:
            chunk = chunks[number]
            if chunk is None:
                return logprobs.sum()
            assert gradient is not None
            targets = torch.from_numpy(chunk.targets).to(gradient.device)
            return (logprobs * gradient.index_select(0, targets)).sum()

        self._stages.forward_backward(self._lengths[::-1], compute, loss)


class _WithPending(torch.autograd.Function):
    """Returns its first input; the backward pass adds pending gradients to the others."""

    @staticmethod
    def forward(
        ctx: Any,
        incoming: Callable[[], Iterator[torch.Tensor]],
        output: torch.Tensor,
        *_: torch.Tensor,
    ) -> torch.Tensor:
        ctx.incoming = incoming
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, gradient, *ctx.incoming()


def _record(
    outputs: dict[int, TargetLogprobs], number: int, output: TargetLogprobs | torch.Tensor
) -> torch.Tensor:
    """Record the last stage's outputs without their graph; return what torch passes on."""
    if not isinstance(output, TargetLogprobs):
        return output
    outputs[number] = output._replace(logprobs=output.logprobs.detach())
    return output.logprobs
