"""FSDP2 through torch's `fully_shard`, with gloo or NCCL: sharding, state dicts, gradient clipping.

With one rank, every function is the plain operation on an unsharded module.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from agentrl.distributed.mesh import Ranks


def shard_model(
    model: nn.Module,
    ranks: Ranks,
    mesh: DeviceMesh | None,
    *,
    compute_dtype: torch.dtype,
    cpu_offload: bool = False,
) -> nn.Module:
    """Shard parameters, gradients and optimizer state over the ranks, layer by layer (in place).

    Parameters keep their dtype; they are gathered in `compute_dtype`, and gradients are reduced in
    the parameters' own dtype. Experts that are already distributed over the `experts` group are
    sharded further over `expert_fsdp`, the ranks that hold the same experts.

    Gradients are *summed* over the ranks, not averaged: the weights of the target tokens are
    normalized over the global batch of the step, so no rank needs to know its share of it.

    Args:
        model: its parameters may already be sharded over `tp` and `experts`.
        ranks: this process among its peers.
        mesh: the result of `ranks.shape.build`; None for a single process.
        compute_dtype: precision of forward and backward passes.
        cpu_offload: keep parameters, gradients and optimizer state in host memory; each layer is
            copied to the device before it is gathered. No effect if the device is the CPU.
    """
    if mesh is None:
        return model
    offload: OffloadPolicy = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    parameters = list(model.parameters())
    # Frozen parameters may have the compute dtype; only trained ones have the master dtype.
    master_dtype = next((p for p in parameters if p.requires_grad), parameters[0]).dtype
    precision = (
        MixedPrecisionPolicy()
        if compute_dtype == master_dtype
        else MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master_dtype)
    )
    for layer in _decoder_layers(model):
        if next(layer.parameters(), None) is None:
            continue  # the layer belongs to another stage of the pipeline
        for module in layer.modules():
            if any(_is_expert_sharded(parameter, mesh) for parameter in module.parameters(False)):
                # Shard along dimension 1, since dimension 0 counts the experts, and a rank may hold
                # fewer experts than there are ranks to shard them over.
                fully_shard(
                    module,
                    mesh=_data_mesh(mesh, "expert_fsdp"),
                    mp_policy=precision,
                    offload_policy=offload,
                    shard_placement_fn=lambda _: Shard(1),
                )
        fully_shard(
            layer, mesh=_data_mesh(mesh, "fsdp"), mp_policy=precision, offload_policy=offload
        )
    fully_shard(model, mesh=_data_mesh(mesh, "fsdp"), mp_policy=precision, offload_policy=offload)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_gradient_divide_factor(1.0)
        if ranks.device.type == "cpu":
            # gloo lacks the pre-multiplied sum; with a factor of 1, a plain sum is the same.
            module.set_force_sum_reduction_for_comms(True)
    return model


def _data_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh that shards along `name`, with its replicas if there are any (HSDP)."""
    return mesh["dp_replicate", name] if mesh["dp_replicate"].size() > 1 else mesh[name]


def _is_expert_sharded(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh == mesh["experts"]


def full_state_dict(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the full state dict in host memory on rank 0, and {} elsewhere (collective).

    Tied parameters appear once, under the name that comes first.
    """
    if ranks.world_size == 1:
        state = dict(model.state_dict())
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = cast(dict[str, torch.Tensor], get_model_state_dict(model, options=options))
    return untied(model, state)


def untied(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in which tied parameters appear once, under the name that comes first."""
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = every.keys() - dict(model.named_parameters()).keys()
    return {name: tensor for name, tensor in state.items() if name not in tied}


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return this rank's shards of the trained parameters; tied ones once, as in `full_state_dict`."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: part for name, part in get_model_state_dict(model).items() if name in trained}


def whole_tensor(part: torch.Tensor) -> torch.Tensor:
    """Gather a tensor of which this rank holds a shard (collective over its mesh)."""
    return part.full_tensor() if isinstance(part, DTensor) else part


def load_sharded_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Load the result of `sharded_state_dict`."""
    # Not strict, because tied parameters appear only once in the state.
    set_model_state_dict(model, state, options=StateDictOptions(strict=False))


def load_full_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Load some of the parameters from full tensors, present on every rank (collective)."""
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, state, options=options)


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    over_stages: Callable[[Sequence[float]], list[float]] = list,
    counted_elsewhere: nn.Parameter | None = None,
) -> float:
    """Scale gradients down to a global L2 norm of `max_norm` (collective)."""
    with_gradient = [
        (parameter, parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    gradients = [gradient for _, gradient in with_gradient]
    squares = squared_norms(
        [grad for parameter, grad in with_gradient if parameter is not counted_elsewhere]
    )
    norm = math.sqrt(over_stages([sum(squares)])[0])
    if math.isfinite(norm):
        # torch's `clip_grad_norm_` rejects gradients on different meshes; the formula is the same.
        scale = min(1.0, max_norm / (norm + 1e-6))
        for gradient in gradients:
            _local(gradient).mul_(scale)
    return norm


def squared_norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of squares of every tensor, plain or sharded, in float64 (collective).

    Tensors with the same mesh and sharded dimensions share one all-reduce.
    """
    parts: dict[DeviceMesh | None, dict[tuple[int, ...], list[int]]] = {}
    for number, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        parts.setdefault(mesh, {}).setdefault(_sharded_dimensions(tensor), []).append(number)
    norms = [0.0] * len(tensors)
    for mesh, by_dimensions in parts.items():
        for dimensions, numbers in by_dimensions.items():
            squares = torch.stack([_local(tensors[n]).double().square().sum() for n in numbers])
            for dimension in dimensions:
                assert mesh is not None
                dist.all_reduce(squares, group=mesh.get_group(dimension))
            for number, square in zip(numbers, squares.tolist(), strict=True):
                norms[number] = square
    return norms


def _sharded_dimensions(tensor: torch.Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(i for i, placement in enumerate(tensor.placements) if not placement.is_replicate())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a Hugging Face decoder, however deep it is wrapped.

    An image encoder may have blocks of the same name, but it is smaller.
    """
    layer_lists = [
        list(module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "layers" and isinstance(module, nn.ModuleList)
    ]
    return max(layer_lists, key=_num_weights, default=[])


def _num_weights(layers: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())
