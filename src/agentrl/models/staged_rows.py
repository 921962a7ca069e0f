"""Passes rows through the stages of a pipeline, forward and backward.

A row within the budget is one pass. A row in chunks is a separate pipeline whose rows are the
chunks: forward in order, then backward in reverse order, as `ChunkedPass` does on one rank. Each
stage keeps what passes between chunks in its own layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from agentrl.data.rows import PackedRow
from agentrl.distributed import Stages
from agentrl.models.chunk_states import ChunkStates
from agentrl.models.chunks import ChunkedPass, Debts, RowChunk
from agentrl.models.policy import TargetLogprobs
from agentrl.models.row_split import RowSplit

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
        self.made: dict[int, TargetLogprobs] = {}
        """The last stage's outputs for each row, without a graph; empty on other stages."""

    def forward(self) -> None:
        """Pass all rows forward (collective)."""
        self._stages.forward(self._lengths, self._compute)

    def forward_backward(self, loss: RowLoss) -> None:
        """Pass all rows forward and gradients back (collective)."""
        self._stages.forward_backward(self._lengths, self._compute, loss)

    def _compute(self, number: int, given: torch.Tensor | None) -> torch.Tensor:
        with self._around():
            made = self._policy(self._rows[number], given=given, **self._options)
        return _kept(self.made, number, made)


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
    ) -> None:
        """Cut the row, into at least as many chunks as there are stages.

        Args:
            policy: see `StagedRows`.
            row: N tokens, T target tokens.
            stages: of the pipeline.
            split: how rows are split over further ranks.
            num_chunks: number that the budget requires; equal on all ranks.
            chunk_size: positions that go through the LM head at a time.
        """
        super().__init__(
            policy, row, num_chunks=max(num_chunks, stages.count), chunk_size=chunk_size
        )
        self._stages = stages
        self._lengths = [split.share(self._row_of(c)).num_own_tokens for c in self._chunks]

    def forward_staged(self, *, with_entropy: bool = False) -> TargetLogprobs | None:
        """Return logprobs (and entropies) of all targets on the last stage (collective)."""
        made: dict[int, TargetLogprobs] = {}

        def compute(number: int, given: torch.Tensor | None) -> torch.Tensor:
            chunk = self._chunks[number]
            states = self._given(chunk)
            output = self._run(chunk, states, with_entropy, given)
            self._keep(chunk, states)
            return _kept(made, number, output)

        self._stages.forward(self._lengths, compute)
        return self._in_order([made[number] for number in sorted(made)]) if made else None

    def backward_staged(
        self, gradient: torch.Tensor | None, around: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Accumulate the gradients of the parameters (collective).

        Args:
            gradient: [T], derivative of the loss with respect to each logprob; None on stages other
                than the last.
            around: context of every forward pass.
        """
        debts = Debts(self._values, self._states)
        chunks = self._chunks[::-1]
        ended: list[tuple[RowChunk, ChunkStates]] = []

        def compute(number: int, given: torch.Tensor | None) -> torch.Tensor:
            chunk = chunks[number]
            states = self._given(chunk)
            for leaf in states.tensors():
                leaf.requires_grad_()
            with around():
                output = self._run(chunk, states, False, given)
            made = output.logprobs if isinstance(output, TargetLogprobs) else output
            if chunk is None:
                return made

            def owed() -> Iterator[torch.Tensor]:
                # A stage finishes its chunks in this order, so the gradients from later chunks are
                # known by now.
                while ended:
                    debts.add(*ended.pop())
                for part, debt in debts.of(chunk, states):
                    if part.requires_grad:
                        yield debt.to(part.dtype)
                ended.append((chunk, states))

            parts = [part for part, _ in debts.of(chunk, states) if part.requires_grad]
            paid: torch.Tensor = _Paying.apply(owed, made, *parts)  # type: ignore[no-untyped-call]
            return paid

        def loss(number: int, logprobs: torch.Tensor) -> torch.Tensor:
            chunk = chunks[number]
            if chunk is None:
                return logprobs.sum()
            assert gradient is not None
            targets = torch.from_numpy(chunk.targets).to(gradient.device)
            return (logprobs * gradient.index_select(0, targets)).sum()

        self._stages.forward_backward(self._lengths[::-1], compute, loss)


class _Paying(torch.autograd.Function):
    """Returns its first input; the backward pass adds pending gradients to the others."""

    @staticmethod
    def forward(
        ctx: Any, owed: Callable[[], Iterator[torch.Tensor]], made: torch.Tensor, *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.owed = owed
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, gradient, *ctx.owed()


def _kept(
    made: dict[int, TargetLogprobs], number: int, output: TargetLogprobs | torch.Tensor
) -> torch.Tensor:
    """Keep the last stage's outputs without their graph; return what torch's stage continues with."""
    if not isinstance(output, TargetLogprobs):
        return output
    made[number] = output._replace(logprobs=output.logprobs.detach())
    return output.logprobs
