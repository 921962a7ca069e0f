"""Tensors without memory and arithmetic, which compute as a CPU or as a GPU would.

torch's `FakeTensorMode` knows shapes, dtypes, storages and devices. Without CUDA it has no
gradients on a CUDA device, so the CPU stands in for a GPU: attention and its kernels take the same
path as on a GPU.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.integrations import moe

from agentrl.models import load, parallel
from agentrl.models.attention import automatic, flex, sdpa, varlen
from agentrl.trainer.learner import passes, rank_models

FakeDevice = Literal["cpu", "gpu", "meta"]
"""The simulated device: a CPU; a GPU; or a device that is neither, on which a tensor left in host
memory is an error.
"""
HOST = "meta"
"""Device for the tensors that a GPU's passes keep in host memory."""


@contextmanager
def fake_tensors(device: FakeDevice) -> Iterator[None]:
    """Make all tensors within the block fake."""
    replacements: list[tuple[Any, str, Any]] = [
        (load, "read_weights", lambda *_, **__: None),
        (rank_models, "compile_policy", lambda *_: None),
        (rank_models, "start_adapter", lambda *_: None),
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
            (passes, "HOST", torch.device(HOST)),
        ]
    if device == "meta":
        replacements += [
            (torch, "autocast", lambda *_, **__: nullcontext()),
            (torch, "is_autocast_enabled", lambda *_: False),
        ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
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
