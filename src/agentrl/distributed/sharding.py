"""FSDP2 through torch's `fully_shard`, which works on gloo as on NCCL.

With one rank every function here is the plain operation on a plain module.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from agentrl.distributed.ranks import Ranks


def shard_model(model: nn.Module, ranks: Ranks, *, compute_dtype: torch.dtype) -> nn.Module:
    """Shard parameters, gradients and optimizer state over the ranks, layer by layer (in place).

    Parameters stay in the precision they have; they are gathered in `compute_dtype`, and gradients
    are reduced in their own.

    Gradients of the ranks are *summed*: the loss terms carry weights that are fixed over the
    optimizer step's global batch, so that no rank has to know what share of it it computes.
    """
    if ranks.world_size == 1:
        return model
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("dp",))
    master_dtype = next(model.parameters()).dtype
    precision = (
        MixedPrecisionPolicy()
        if compute_dtype == master_dtype
        else MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master_dtype)
    )
    for module in (*_decoder_layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_gradient_divide_factor(1.0)
        if ranks.device.type == "cpu":
            # gloo has no pre-multiplied sum; a plain sum is all that a factor of 1 needs.
            module.set_force_sum_reduction_for_comms(True)
    return model


def full_state_dict(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the whole state dict in CPU memory on rank 0, and {} elsewhere (collective).

    Tied parameters stand in it once, under the name that comes first.
    """
    if ranks.world_size == 1:
        state = dict(model.state_dict())
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = cast(dict[str, torch.Tensor], get_model_state_dict(model, options=options))
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = every.keys() - dict(model.named_parameters()).keys()
    return {name: tensor for name, tensor in state.items() if name not in tied}


def load_full_state_dict(model: nn.Module, state: dict[str, torch.Tensor], ranks: Ranks) -> None:
    """Load what `full_state_dict` returned; every rank holds all of it (collective)."""
    # Tied parameters are in it once, so it is not complete by name.
    if ranks.world_size == 1:
        model.load_state_dict(state, strict=False)
        return
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, cast(dict[str, Any], state), options=options)


def full_optimizer_state(model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> dict[str, Any]:
    """Return the whole optimizer state, keyed by parameter name, on rank 0 (collective)."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=ranks.world_size > 1)
    return get_optimizer_state_dict(model, optimizer, options=options)


def load_full_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any], ranks: Ranks
) -> None:
    """Load what `full_optimizer_state` returned; every rank holds all of it (collective).

    The number of ranks may differ from the one that saved it.
    """
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to `max_norm` and return their global norm before that (collective).

    With a norm that is not finite the gradients are left as they are.
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    if not with_gradients:
        return 0.0
    norm = nn.utils.get_total_norm([p.grad for p in with_gradients if p.grad is not None])
    # Under FSDP2 the norm is a DTensor of per-rank parts that still have to be summed up.
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if torch.isfinite(whole):
        nn.utils.clip_grads_with_norm_(with_gradients, max_norm, whole)
    return float(whole)


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a Hugging Face decoder, however deep it is wrapped."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "layers" and isinstance(module, nn.ModuleList):
            return list(module)
    return []
