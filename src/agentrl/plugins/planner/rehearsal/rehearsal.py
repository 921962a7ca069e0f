"""Predicts the cost of an optimizer step: runs the real learner on tensors without memory.

Input: a learner's inputs, and a mesh. Output: the memory of a rank, part by part, and the places
where the step waits for its device. No weights are read, nothing is computed, and no GPU is needed:
a model of any size takes seconds. Memory outside torch's tensors is not counted: the CUDA context,
workspaces of kernels, buffers of NCCL, and gaps between tensors.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data import MicroBatch
from agentrl.data.rows import PackedRow
from agentrl.distributed import MeshShape, Ranks
from agentrl.errors import ConfigError
from agentrl.models.flops import FlopCount
from agentrl.plugins.planner.rehearsal.fake_device import HOST, FakeDevice, fake_group, fake_tensors
from agentrl.plugins.planner.rehearsal.observers import Allocations, HostReads
from agentrl.trainer.bootstrap import mesh_shape
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

T = TypeVar("T")
_BATCHES_PER_STAGE = 2
"""Enough for the first stage to hold the activations of as many micro-batches as there are stages.
"""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int
    passes: int
    """Peak on the device while gradients are computed, including all of the above."""
    update: int
    """Peak on the device while the optimizer updates the weights."""
    offloaded: int
    """Peak of activations in host memory, with `--activation_offloading`."""
    made: int
    """Bytes of all tensors that the passes create in total."""
    num_parameters: int
    """Of the whole model, or of a stage of it."""
    num_trained: int
    flops: FlopCount
    host_reads: dict[str, int]
    """Place where a micro-batch waits for the device -> number of times."""

    @property
    def peak(self) -> int:
        """Peak on the device."""
        return max(self.passes, self.update)

    @property
    def activations(self) -> int:
        """Memory of the passes besides weights, gradients and optimizer; copies included."""
        return self.passes - self.weights - self.gradients - self.optimizer


def rehearse(
    settings: LearnerSettings,
    shape: MeshShape,
    batch: MicroBatch,
    *,
    device: FakeDevice,
    stage: int = 0,
) -> StepMemory:
    """Run a step with an earlier micro-batch's gradients and the optimizer's state in place.

    A pipeline gets as many equal micro-batches as it takes to keep all stages busy.

    Args:
        settings: of the learner; only config.json of the model is read.
        shape: the mesh.
        batch: the micro-batch.
        device: the simulated device.
        stage: of a pipeline, from 0; its first rank runs the step.
    """
    device_type = "meta" if device == "meta" else "cpu"
    rank = stage * shape.world_size // shape.pp
    ranks = _SingleRank(rank, shape.world_size, shape=shape, computes_on=device_type)
    reads, memory = HostReads(torch.device(device_type)), Allocations()
    with fake_group(rank, shape.world_size), fake_tensors(device), reads, memory:
        learner = _MeasuredLearner(settings, ranks)
        sizes = learner.begin(memory, device_type)
        reads.places.clear()
        learner.forward_backward([batch] * (1 if shape.pp == 1 else _BATCHES_PER_STAGE * shape.pp))
        learner.optim_step()
        return StepMemory(
            weights=sizes["weights"],
            gradients=sizes["gradients"],
            optimizer=sizes["optimizer"],
            passes=learner.peaks[device_type],
            update=memory.peak[device_type],
            offloaded=learner.peaks[HOST] if settings.trainer.activation_offloading else 0,
            made=learner.made,
            host_reads=dict(reads.places),
            **learner.sizes(),
        )


def rehearse_run(
    model: ModelSection,
    trainer: TrainerSection,
    algorithm: AlgorithmSection,
    *,
    model_path: Path,
    longest: int,
    device: FakeDevice,
) -> StepMemory:
    """Rehearse the largest micro-batch that the flags of a run allow, on the fullest stage."""
    if trainer.merge == "none":
        batch = filled_row(longest, longest)
    else:
        num_chunks = -(-longest // trainer.max_tokens)
        batch = filled_row(max(longest, trainer.max_tokens), longest, num_chunks=num_chunks)
    reference = algorithm.kl_coefficient and not model.lora_rank
    settings = LearnerSettings(
        weights=StartWeights(model_path),
        model=model,
        trainer=trainer,
        algorithm=algorithm,
        seed=0,
        reference_path=model_path if reference else None,
    )
    shape = mesh_shape(trainer, trainer.num_processes)
    try:
        stages = [
            rehearse(settings, shape, batch, device=device, stage=stage)
            for stage in range(shape.pp)
        ]
    except (
        NotImplementedError,
        UnsupportedFakeTensorException,
        DynamicOutputShapeException,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the model at {model_path} cannot be rehearsed, because its shapes depend on values: "
            f"{reason}"
        ) from error
    return replace(
        max(stages, key=lambda stage: stage.peak),
        num_parameters=sum(stage.num_parameters for stage in stages),
        num_trained=sum(stage.num_trained for stage in stages),
    )


def filled_row(num_tokens: int, longest: int, *, num_chunks: int = 1) -> MicroBatch:
    """Return a row of conversations with all of their tokens in the loss."""
    starts = np.arange(0, num_tokens, longest)
    ends = np.minimum(starts + longest, num_tokens)
    lengths = ends - starts
    positions = np.concatenate([np.arange(length) for length in lengths])
    sources = np.flatnonzero(positions < np.repeat(lengths, lengths) - 1)
    zeros, ones = np.zeros(len(sources), dtype=np.int64), np.ones(len(sources))
    row = PackedRow(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        subtree_ends=np.repeat(ends, lengths),
        sources=sources,
        targets=zeros,
        temperatures=ones.astype(np.float32),
    )
    return MicroBatch(
        row=row,
        turns=zeros,
        records=zeros,
        advantages=ones,
        behavior_logprobs=-ones.astype(np.float32),
        teacher_logprobs=-ones.astype(np.float32)[:, None],
        staleness=zeros,
        weights=ones / max(len(sources), 1),
        num_chunks=num_chunks,
    )


class _MeasuredLearner(Learner):
    """A learner that reports the memory it holds."""

    def begin(self, memory: Allocations, device_type: str) -> dict[str, int]:
        """Put gradients and the optimizer's state in place; return the bytes of each."""
        trained = [p for p in self._policy.parameters() if p.requires_grad]
        sizes = {"weights": memory.live[device_type]}
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        sizes["gradients"] = memory.live[device_type] - sum(sizes.values())
        self._optimizer.step()
        sizes["optimizer"] = memory.live[device_type] - sum(sizes.values())
        memory.restart()
        self.peaks: Counter[str] = Counter()
        bytes_before = memory.made

        def record_passes(*_: Any) -> None:
            self.peaks.update(memory.peak)
            self.made = memory.made - bytes_before
            memory.restart()

        self._optimizer.register_step_pre_hook(record_passes)
        return sizes

    def sizes(self) -> dict[str, Any]:
        """Return the counts of parameters and operations."""
        stage = self._policy.stage
        parameters = [
            parameter
            for name, parameter in self._policy.named_parameters()
            if stage.number == 0 or not stage.is_tied(name)
        ]
        return {
            "num_parameters": sum(p.numel() for p in parameters),
            "num_trained": sum(p.numel() for p in parameters if p.requires_grad),
            "flops": self.flops,
        }


@dataclass(frozen=True)
class _SingleRank(Ranks):
    """A rank without peers: exchanged Python objects are its own."""

    computes_on: str = "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device(self.computes_on)

    def build_mesh(self) -> DeviceMesh | None:
        with unset_fake_temporarily():  # a mesh needs the real number of ranks
            return super().build_mesh()

    def new_group(self) -> None:
        return None

    def gather_dp(self, value: T) -> list[T]:
        return [value]

    def sum(self, values: Any) -> list[float]:
        return list(values)
