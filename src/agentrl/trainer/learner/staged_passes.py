"""`StagedPasses`: passes of a share's micro-batches through the stages of a pipeline.

Does for all micro-batches of a step what `passes.forward_backward` does for one. The last stage
owns the loss: it has the logprobs of a row, computes the loss from them, and starts the backward
pass. Outcomes exist on the last stage only.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from agentrl.config.sections import AlgorithmSection
from agentrl.data import MicroBatch
from agentrl.data.batch import empty_batch
from agentrl.distributed import Stages, clip_gradients
from agentrl.models.policy import PolicyModel
from agentrl.models.staged_rows import StagedChunks, StagedRows
from agentrl.trainer.learner.passes import (
    PassLoss,
    PassOutcome,
    activations_in_host_memory,
    chunk_states_device,
    loss_of,
)


@dataclass(frozen=True)
class StagedPasses:
    """Passes of a model of which this rank has a stage."""

    policy: PolicyModel
    stages: Stages
    reference: nn.Module | None
    """Model of the KL penalty, in the same stages."""
    chunk_size: int
    with_entropy: bool
    activation_offloading: bool

    def forward_backward(
        self, batches: Sequence[MicroBatch], algorithm: AlgorithmSection | None
    ) -> Iterator[tuple[MicroBatch, PassOutcome]]:
        """See `Passes`; equal micro-batches on all stages."""
        short = [batch for batch in batches if batch.num_chunks == 1]
        if short:  # the schedule needs at least as many rows as stages
            short += [empty_batch(1)] * (self.stages.count - len(short))
            yield from self._short_rows(short, algorithm)
        for batch in batches:
            if batch.num_chunks > 1:
                yield from self._long_row(batch, algorithm)
        tied = self._tied_parameter()
        if tied is not None and tied.grad is not None:
            self.stages.all_reduce_ends(tied.grad)

    def logprobs(self, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """See `Passes`."""
        yield from self._frozen_logprobs(self.policy, batches)

    def clip_gradients(self, max_norm: float) -> float:
        """See `Passes`; the first stage also counts what the last one has."""
        return clip_gradients(
            self.policy.parameters(),
            max_norm,
            over_stages=self.stages.sum,
            counted_elsewhere=self._tied_parameter() if self.stages.is_last else None,
        )

    def _tied_parameter(self) -> nn.Parameter | None:
        """Return the parameter that the first and the last stage share."""
        name = self.policy.stage.tied
        return None if name is None else self.policy.model.get_parameter(name)

    def _short_rows(
        self, batches: Sequence[MicroBatch], algorithm: AlgorithmSection | None
    ) -> Iterator[tuple[MicroBatch, PassOutcome]]:
        reference_logprobs = self._reference_logprobs(batches)
        losses: dict[int, PassLoss] = {}

        def loss(number: int, logprobs: torch.Tensor) -> torch.Tensor:
            policy = rows.outputs[number]._replace(logprobs=logprobs)
            losses[number] = loss_of(
                policy, batches[number], algorithm, reference_logprobs.get(number)
            )
            return losses[number].loss

        rows = self._rows(self.policy, batches, with_entropy=self.with_entropy)
        rows.forward_backward(loss)
        for number, output in rows.outputs.items():
            yield batches[number], losses[number].outcome(output)

    def _long_row(
        self, batch: MicroBatch, algorithm: AlgorithmSection | None
    ) -> Iterator[tuple[MicroBatch, PassOutcome]]:
        reference_logprobs = self._reference_logprobs([batch])
        passes = self._chunks(self.policy, batch)
        output = passes.forward_staged(with_entropy=self.with_entropy)
        gradient = None
        if output is not None:
            output.logprobs.requires_grad_()
            pass_loss = loss_of(output, batch, algorithm, reference_logprobs.get(0))
            (gradient,) = torch.autograd.grad(pass_loss.loss, output.logprobs)
            yield batch, pass_loss.outcome(output)
        passes.backward_staged(gradient, self._offloading)

    def _reference_logprobs(self, batches: Sequence[MicroBatch]) -> dict[int, torch.Tensor]:
        """Return the reference's logprobs by the number of the micro-batch, on the last stage."""
        if self.reference is None:
            return {}
        found = self._frozen_logprobs(self.reference, batches)
        # By identity, because micro-batches hold arrays and cannot be compared. The empty ones that
        # fill up a step may be the same object.
        numbers = {id(batch): number for number, batch in enumerate(batches)}
        return {numbers[id(batch)]: logprobs for batch, logprobs in found}

    def _frozen_logprobs(
        self, policy: nn.Module, batches: Sequence[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        short = [batch for batch in batches if batch.num_chunks == 1]
        if short:
            rows = self._rows(policy, short)
            rows.forward()
            for number, result in rows.outputs.items():
                yield short[number], result.logprobs
        for batch in batches:
            if batch.num_chunks > 1:
                output = self._chunks(policy, batch).forward_staged()
                if output is not None:
                    yield batch, output.logprobs

    def _rows(
        self, policy: nn.Module, batches: Sequence[MicroBatch], *, with_entropy: bool = False
    ) -> StagedRows:
        return StagedRows(
            policy,
            [batch.row for batch in batches],
            self.stages,
            self.policy.split,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            around=self._offloading,
        )

    def _chunks(self, policy: nn.Module, batch: MicroBatch) -> StagedChunks:
        return StagedChunks(
            policy,
            batch.row,
            self.stages,
            self.policy.split,
            num_chunks=batch.num_chunks,
            chunk_size=self.chunk_size,
            states_device=chunk_states_device(self.activation_offloading),
        )

    def _offloading(self) -> AbstractContextManager[object]:
        return activations_in_host_memory() if self.activation_offloading else nullcontext()
