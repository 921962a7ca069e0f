"""Runs the real learner's step on tensors without memory, and measures what a rank would hold.

Input: a learner's inputs, and a mesh. Output: the memory of a rank, part by part. No weights are read,
nothing is computed, and no GPU is needed: a model of any size takes seconds. Memory outside torch's
tensors is not counted: the CUDA context, workspaces of kernels, buffers of NCCL, and gaps between
tensors.

torch's `FakeTensorMode` knows shapes, dtypes, storages and devices. Without CUDA it has no gradients
on a CUDA device, so the CPU stands in for a GPU, and `_fake_tensors` replaces what asks for the
device. As a program, this module answers one request (`memory_plan`).
"""

import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import moe

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data import MicroBatch
from agentrl.data.rows import PackedRow
from agentrl.distributed import MeshShape, Ranks
from agentrl.distributed.dtypes import dtype_name
from agentrl.errors import ConfigError
from agentrl.models import load, parallel
from agentrl.models.attention import automatic, flex, sdpa, varlen
from agentrl.trainer.bootstrap import mesh_shape
from agentrl.trainer.learner import passes
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

T = TypeVar("T")
FakeDevice = Literal["cpu", "gpu"]
_HOST = "meta"
"""Device for the tensors that a GPU's passes keep in host memory."""
_BATCHES_PER_STAGE = 2
"""Enough for the first stage to hold the activations of as many micro-batches as there are stages.
"""
_BLOCK_BYTES = 512
"""CUDA's allocator returns whole blocks."""
_READERS: dict[str, Callable[[Any], object]] = {
    "item": np.ndarray.item,
    "tolist": np.ndarray.tolist,
    "numpy": lambda values: values,
    "__float__": float,
    "__int__": int,
    "__bool__": bool,
    "__index__": int,
}


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
    num_parameters: int
    """Of the whole model, or of a stage of it."""
    num_trained: int

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
    rank = stage * shape.world_size // shape.pp
    ranks = _SingleRank(rank, shape.world_size, shape=shape)
    # A compiled step needs less, and compiling it takes minutes.
    plain = settings.trainer.model_copy(update={"torch_compile": False})
    memory = _Allocations()
    with _fake_group(rank, shape.world_size), _fake_tensors(device), ValueReads(), memory:
        learner = _MeasuredLearner(replace(settings, trainer=plain), ranks)
        sizes = learner.begin(memory)
        learner.forward_backward([batch] * (1 if shape.pp == 1 else _BATCHES_PER_STAGE * shape.pp))
        learner.optim_step(0)
        return StepMemory(
            **sizes,
            passes=learner.peaks["cpu"],
            update=memory.peak["cpu"],
            offloaded=learner.peaks[_HOST] if plain.activation_offloading else 0,
            **learner.counts(),
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

    def begin(self, memory: "_Allocations") -> dict[str, int]:
        """Put gradients and the optimizer's state in place; return the bytes of each."""
        trained = [p for p in self._policy.parameters() if p.requires_grad]
        sizes = {"weights": memory.live["cpu"]}
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        sizes["gradients"] = memory.live["cpu"] - sum(sizes.values())
        self._optimizer.step()
        sizes["optimizer"] = memory.live["cpu"] - sum(sizes.values())
        memory.restart()
        self.peaks: Counter[str] = Counter()

        def record_passes(*_: Any) -> None:
            self.peaks.update(memory.peak)
            memory.restart()

        self._optimizer.register_step_pre_hook(record_passes)
        return sizes

    def counts(self) -> dict[str, int]:
        """Return the numbers of parameters."""
        stage = self._policy.stage
        parameters = [
            parameter
            for name, parameter in self._policy.named_parameters()
            if stage.number == 0 or not stage.is_tied(name)
        ]
        return {
            "num_parameters": sum(p.numel() for p in parameters),
            "num_trained": sum(p.numel() for p in parameters if p.requires_grad),
        }


@dataclass(frozen=True)
class _SingleRank(Ranks):
    """A rank without peers: exchanged Python objects are its own."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def build_mesh(self) -> DeviceMesh | None:
        with unset_fake_temporarily():  # a mesh needs the real number of ranks
            return super().build_mesh()

    def new_group(self) -> None:
        return None

    def gather_dp(self, value: T) -> list[T]:
        return [value]

    def sum(self, values: Any) -> list[float]:
        return list(values)


@contextmanager
def _fake_tensors(device: FakeDevice) -> Iterator[None]:
    """Make all tensors within the block fake."""
    replacements: list[tuple[Any, str, Any]] = [
        (parallel, "exchanged_counts", _equal_counts),
        # torch infers the shapes of its kernel for experts only in bfloat16.
        (moe, "_can_use_grouped_mm", lambda *_: False),
        # FakeTensor's own method would read every value separately.
        (FakeTensor, "tolist", torch.Tensor.tolist),
    ]
    if device == "gpu":
        replacements += [
            (load, "check_device", lambda *_: None),
            (automatic, "masks_blocks", lambda _: True),
            (sdpa.RowLayout, "has_segments", False),
            (flex, "flex_attention", _fused_attention),
            (varlen, "varlen_attn", _fused_rows),
            (passes, "HOST", torch.device(_HOST)),
        ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


@contextmanager
def _fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Act as a rank of a process group without peers: collectives return at once."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # its cache belongs to a mesh of this group


def _equal_counts(
    ranks: torch.Tensor, num_ranks: int, _group: dist.ProcessGroup
) -> tuple[list[int], list[int]]:
    """Return the counts of evenly distributed rows; replaces `parallel.exchanged_counts`."""
    count, remainder = divmod(len(ranks), num_ranks)
    counts = [count + (rank < remainder) for rank in range(num_ranks)]
    return counts, counts


class _Aux(NamedTuple):
    lse: torch.Tensor


def _fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
) -> Any:
    output, lse = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output if settings["return_aux"] is None else (output, _Aux(lse))


def _fused_rows(*states: torch.Tensor, **_settings: Any) -> torch.Tensor:
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in states[:3])
    output: torch.Tensor = _FusedAttention.apply(query, key, value)[0]  # type: ignore[no-untyped-call]
    return output[0].transpose(0, 1)


class _FusedAttention(torch.autograd.Function):
    """Saves and allocates the same tensors as a fused kernel, none of them of size N x N."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, _, value = inputs
        output = query.new_empty((*query.shape[:3], value.shape[3]))
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(*inputs, output, lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


@dataclass(eq=False)
class _Block:
    """The memory of one storage."""

    device: str
    size: int = 0


class _Allocations(TorchDispatchMode):
    """Counts the bytes of all storages created within the block (a context manager)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its signature out
        self.live: Counter[str] = Counter()
        """Bytes by type of device."""
        self.peak: Counter[str] = Counter()
        """Peak since the last call of `restart`."""
        self._blocks: weakref.WeakKeyDictionary[torch.UntypedStorage, _Block] = (
            weakref.WeakKeyDictionary()
        )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            # FSDP2 empties and refills the storages of gathered parameters.
            result = resize(storage, size)
            if storage in self._blocks:
                self._resize(self._blocks[storage], size)
            return result

        self._stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def restart(self) -> None:
        """Reset the peak."""
        self.peak = Counter(self.live)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the call is repeated with local tensors
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                self._track(leaf)
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        device, storage = tensor.device.type, tensor.untyped_storage()
        if not isinstance(tensor, FakeTensor) or storage in self._blocks:
            return
        block = _Block(device)
        self._blocks[storage] = block
        self._resize(block, storage.nbytes())
        weakref.finalize(storage, self._resize, block, 0).atexit = False

    def _resize(self, block: _Block, size: int) -> None:
        change = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES - block.size
        block.size += change
        self.live[block.device] += change
        self.peak[block.device] = max(self.peak[block.device], self.live[block.device])


class ValueReads(TorchFunctionMode):
    """Answers reads of fake tensors' values with ones, within the block (a context manager)."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        read = _READERS.get(getattr(function, "__name__", ""))
        if read is None or not args or not isinstance(args[0], FakeTensor):
            return function(*args, **(kwargs or {}))
        tensor = args[0]
        dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        return read(np.ones(tuple(tensor.shape), dtype=dtype_name(dtype)))


def _answer(request: dict[str, Any]) -> dict[str, int]:
    """Rehearse the step of a request."""
    memory = rehearse_run(
        ModelSection.model_validate(request["model"]),
        TrainerSection.model_validate(request["trainer"]),
        AlgorithmSection.model_validate(request["algorithm"]),
        model_path=Path(request["model_path"]),
        longest=request["longest"],
        device=request["device"],
    )
    names = ("weights", "gradients", "optimizer", "activations", "peak", "offloaded")
    return {name: getattr(memory, name) for name in (*names, "num_parameters", "num_trained")}


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # modeling code may print
        answer = _answer(json.load(sys.stdin))
    sys.stdout.write(json.dumps(answer))
