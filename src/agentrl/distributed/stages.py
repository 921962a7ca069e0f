"""`Stages`: the ranks along `pp`, through which the rows of a step pass one after the other.

torch's pipelining runs the schedules: 1F1B with a backward pass, GPipe without. It sends tensors of
one shape, while rows differ in length; every rank of a share knows all of its rows, so hidden
states travel in tensors of the longest row's size and are cut on arrival. Nothing is computed on
the padding.

Input: functions that compute a row on this rank's stage. Output: the last stage's results.
Independent of models and losses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from agentrl.distributed.sharding import untied, whole_tensor
from agentrl.errors import AgentRLError

Compute = Callable[[int, torch.Tensor | None], torch.Tensor]
"""Computes a row on this stage: its number and the hidden states [1, tokens, D] of the previous
stage (None on the first) to its own hidden states or, on the last stage, to the inputs of the loss.
"""
Loss = Callable[[int, torch.Tensor], torch.Tensor]
"""Returns the loss of a row from its number and what the last stage computed."""

_ROWS_PER_STAGE = 8
"""Rows per round, in multiples of the number of stages. With more rows, stages wait less."""
Convert = Callable[[torch.Tensor], torch.Tensor]


def _identity(part: torch.Tensor) -> torch.Tensor:
    return part


def _no_loss(_number: int, output: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), device=output.device)


class Stages:
    """The stages of one model, from the point of view of one stage's rank."""

    def __init__(
        self, mesh: DeviceMesh, device: torch.device, *, width: int, dtype: torch.dtype
    ) -> None:
        """Create the stage of this rank."""
        self._group = mesh.get_group()
        self._device, self._width, self._dtype = device, width, dtype
        self.number = mesh.get_local_rank()
        """This rank's stage, from 0."""
        self.count = mesh.size()
        ranks = dist.get_process_group_ranks(self._group)
        # Only one of the parallel pipelines contains rank 0, on which tensors are gathered.
        self._contains_rank_0 = ranks[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.number == self.count - 1

    @torch.no_grad()
    def forward(self, lengths: Sequence[int], compute: Compute) -> None:
        """Pass rows through all stages (collective)."""
        for rows in self._rounds(len(lengths)):
            stage = self._stage(rows, lengths, compute, _no_loss)
            self._run(ScheduleGPipe(stage, len(rows)), rows)

    def forward_backward(self, lengths: Sequence[int], compute: Compute, loss: Loss) -> None:
        """Pass rows forward and gradients back (collective); a stage ends rows in their order."""
        for rows in self._rounds(len(lengths)):
            schedule = Schedule1F1B(
                self._stage(rows, lengths, compute, loss),
                len(rows),
                loss_fn=lambda computed, _target: computed,
                scale_grads=False,
            )
            self._run(schedule, rows, has_target=self.is_last)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise float64 sum over the stages (collective)."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self._group)
        summed: list[float] = total.tolist()
        return summed

    @torch.no_grad()
    def all_reduce_ends(self, part: torch.Tensor) -> None:
        """Sum a tensor over the first and last stage, in place; only these two call it."""
        if self.count == 1:
            return
        local = part.to_local() if isinstance(part, DTensor) else part
        other = torch.empty_like(local)
        peer = self.count - 1 - self.number
        operations = [
            dist.P2POp(dist.isend, local.contiguous(), group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        local += other

    @torch.no_grad()
    def whole_tensors(
        self, parts: Mapping[str, torch.Tensor], convert: Convert = _identity
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the tensors of all stages one by one (collective); they are yielded on rank 0."""
        all_descriptions: list[Any] = [None] * self.count
        descriptions = [
            (name, part.shape, convert(torch.empty(0, dtype=part.dtype)).dtype)
            for name, part in parts.items()
        ]
        dist.all_gather_object(all_descriptions, descriptions, group=self._group)
        seen: set[str] = set()
        for number, tensors in enumerate(all_descriptions):
            for name, shape, dtype in tensors:
                if name in seen:
                    continue
                seen.add(name)
                part = convert(parts[name]) if number == self.number else None
                whole = self._send_to_first(number, part, shape, dtype)
                if whole is not None and self._contains_rank_0:
                    yield name, whole

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the full state of all stages in host memory on rank 0, {} elsewhere (collective)."""
        parts = untied(model, get_model_state_dict(model))
        return {name: tensor.cpu() for name, tensor in self.whole_tensors(parts)}

    def _send_to_first(
        self, number: int, part: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Send stage `number`'s whole tensor to the first stage, which returns it (others None)."""
        whole = None
        if self.number == number:
            assert part is not None
            whole = whole_tensor(part)
        if number == 0 or not self._contains_rank_0:
            return whole if self.number == 0 else None
        if self.number == number:
            assert whole is not None
            dist.send(whole.contiguous(), group=self._group, group_dst=0)
            return None
        if self.number == 0:
            whole = torch.empty(shape, dtype=dtype, device=self._device)
            dist.recv(whole, group=self._group, group_src=number)
        return whole

    def _rounds(self, num_rows: int) -> Iterator[range]:
        """Yield the rows of each round; torch allocates memory for all hidden states of a round."""
        num_rounds = -(-num_rows // (_ROWS_PER_STAGE * self.count))
        edges = [num_rows * number // num_rounds for number in range(num_rounds + 1)]
        for start, end in pairwise(edges):
            yield range(start, end)

    def _stage(
        self, rows: range, lengths: Sequence[int], compute: Compute, loss: Loss
    ) -> PipelineStage:
        """Return torch's stage for rows of these lengths."""
        longest = max(lengths[number] for number in rows)
        hidden = torch.empty(1, longest, self._width, dtype=self._dtype, device="meta")
        hidden.requires_grad_(torch.is_grad_enabled())
        number = torch.zeros(1, dtype=torch.int64)
        return PipelineStage(
            _Stage(rows, lengths, longest, compute, loss if self.is_last else None),
            self.number,
            self.count,
            self._device,
            input_args=number if self.number == 0 else hidden,
            # torch wants one shape for all rows, which the inputs of the loss do not have.
            output_args=torch.zeros(()) if self.is_last else hidden,
            group=self._group,
        )

    def _run(self, schedule: Any, rows: range, *, has_target: bool = False) -> None:
        # torch splits its input into one microbatch per row; the values are not used.
        markers = torch.zeros(len(rows), dtype=torch.int64)
        inputs = (markers,) if self.number == 0 else ()
        target = markers if has_target else None
        try:
            schedule.step(*inputs, target=target, return_outputs=False)
        except RuntimeError as error:  # torch wraps exceptions of a stage
            if isinstance(error.__cause__, AgentRLError):
                raise error.__cause__ from None
            raise


def whole_tensors(
    parts: Mapping[str, torch.Tensor], stages: Stages | None, convert: Convert = _identity
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather tensors one by one (collective): on all ranks, or those of all stages on rank 0."""
    if stages is not None:
        yield from stages.whole_tensors(parts, convert)
        return
    for name, part in parts.items():
        yield name, whole_tensor(convert(part))


class _Stage(nn.Module):
    """The module that torch's stage calls for one row after another.

    It has no parameters, because torch would manage them.
    """

    def __init__(
        self,
        rows: range,
        lengths: Sequence[int],
        longest: int,
        compute: Compute,
        loss: Loss | None,
    ) -> None:
        super().__init__()
        self._numbers = iter(rows)
        self._lengths, self._longest = lengths, longest
        self._compute, self._loss = compute, loss

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        number = next(self._numbers)
        is_first = not hidden.is_floating_point()
        output = self._compute(number, None if is_first else hidden[:, : self._lengths[number]])
        if self._loss is not None:
            return self._loss(number, output)
        return pad(output, (0, 0, 0, self._longest - output.shape[1])).contiguous()
