"""Split a policy's weights and activations over the `tp` and `ep` dimensions of a mesh.

Tensor parallelism is torch's, with sequence parallelism between the blocks: weights are split by
columns and rows, activations between the blocks by tokens, embedding and LM head by vocabulary.

Experts are distributed whole over the product of `ep` and `tp`: with sequence parallelism, the ranks
along both dimensions hold different tokens at that point. Each token is sent to the ranks of its
experts; there is no capacity limit, so no token is dropped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from agentrl.distributed.collectives import all_to_all
from agentrl.errors import ConfigError
from agentrl.models.lora import BASE, adapter_parts
from agentrl.models.policy import PolicyModel
from agentrl.models.recurrent.recurrent_layers import has_recurrent_layers
from agentrl.models.router_replay import is_mixture
from agentrl.models.row_split import RowSplit


def parallelize(policy: PolicyModel, mesh: DeviceMesh | None) -> PolicyModel:
    """Split a policy over `tp`, `ep` and `cp` (in place). Apply FSDP2 afterwards.

    Args:
        policy: every rank holds the same weights, or all parameters are on the meta device.
        mesh: see `distributed.mesh`; None for a single process.

    Raises:
        ConfigError: the model's layers cannot be divided so.
    """
    if mesh is None:
        return policy
    model = policy.model
    check_divisible(model, tp=mesh["tp"].size(), cp=mesh["cp"].size(), ep=mesh["ep"].size())
    policy.split = RowSplit(mesh)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if mesh["tp"].size() > 1:
        _split_tensors(model, mesh["tp"])
    if mesh["experts"].size() > 1:
        for module in model.modules():
            if is_mixture(module):
                _deal_out(module.experts, mesh["experts"])
    for name in frozen:  # `SequenceParallel` recreates norm weights with requires_grad=True
        model.get_parameter(name).requires_grad = False
    return policy


def check_divisible(model: Any, *, tp: int, cp: int, ep: int) -> None:
    """Refuse to divide layers that are arranged in another way than those known here.

    Raises:
        ConfigError: names the flag and the part of a layer.
    """
    family = model.config.model_type
    if max(tp, cp) > 1 and has_recurrent_layers(model):
        flag = "--tp_size" if tp > 1 else "--cp_size"
        raise ConfigError(f"{flag}: recurrent layers ({family}) are not divided; use 1")
    if tp > 1:
        refused = {part for layer in model.base_model.layers for part in _undivided_parts(layer)}
        if refused:
            raise ConfigError(
                f"--tp_size: {', '.join(sorted(refused))} in layers of {family} are not divided; use 1"
            )
    if ep > 1:
        for block in filter(is_mixture, model.modules()):
            stacks = {name for name, _ in block.experts.named_parameters()}
            if stacks != {"gate_up_proj", "down_proj"} or _children(block) != {"gate", "experts"}:
                raise ConfigError(
                    f"--ep_size: experts as {type(block).__name__} has them are not divided; use 1"
                )


_DIVIDED = {
    "": {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn", "gate", "experts"},
}
"""Parts of a decoder layer that `_layer_plan` divides, by the module that they belong to."""


def _undivided_parts(layer: nn.Module) -> Iterator[str]:
    yield from _children(layer) - _DIVIDED[""]
    for owner, known in _DIVIDED.items():
        if owner and hasattr(layer, owner):
            module = layer.get_submodule(owner)
            own = {name for name, _ in module.named_parameters(recurse=False)}
            yield from (f"{owner}.{name}" for name in (_children(module) | own) - known)
            for name in ("q_norm", "k_norm"):
                # One weight for the heads of all ranks is known; one for all heads together is not.
                norm = getattr(module, name, None)
                if norm is not None and norm.weight.numel() != module.head_dim:
                    yield f"{owner}.{name}"


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _split_tensors(model: Any, mesh: DeviceMesh) -> None:
    base = model.base_model
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
    }
    for number, layer in enumerate(base.layers):
        layer_plan = _with_adapters(layer, _layer_plan(layer), mesh)
        plan |= {f"layers.{number}.{name}": style for name, style in layer_plan.items()}
        if is_mixture(layer.mlp):
            _replicate(layer.mlp.gate, mesh)
    parallelize_module(base, mesh, plan, src_data_rank=None)
    head = model.get_output_embeddings()
    # The head's input is replicated; its logits stay split by vocabulary (see `vocabulary`).
    parallelize_module(head, mesh, ColwiseParallel(), src_data_rank=None)
    if model.config.tie_word_embeddings:
        # `parallelize_module` replaced both parameters; both are now split by vocabulary rows.
        head.weight = base.embed_tokens.weight


def _layer_plan(layer: Any) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(use_local_output=True),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(use_local_output=True),
    }
    for name in ("q_norm", "k_norm"):
        if hasattr(layer.self_attn, name):
            # One weight serves the heads of all ranks. Unless its gradient is summed over them, each
            # rank trains its own copy, an error that the loss curve does not reveal.
            plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if not is_mixture(layer.mlp):
        plan |= {
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
    return plan


def _with_adapters(
    layer: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh
) -> dict[str, ParallelStyle]:
    """Return a layer's plan, extended to the adapters of its linear layers.

    If W is split by columns, A is replicated and B split by columns; if W is split by rows, A is
    split by rows and B replicated. Either way the ranks exchange only activations of width `rank`.
    """
    found: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        module = layer.get_submodule(name)
        parts = adapter_parts(module)
        if parts is None:
            found[name] = style
            continue
        found[f"{name}.{BASE}"] = style
        down, up = parts
        if isinstance(style, ColwiseParallel):
            # Every rank computes A for all tokens. DTensor tracks that the gradient from B is
            # partial, since each rank holds some of B's columns, and sums it.
            _distribute(module.get_submodule(down), mesh, Replicate())
            found[f"{name}.{up}"] = ColwiseParallel()
        else:
            found[f"{name}.{down}"] = style
            _replicate(module.get_submodule(up), mesh)
    return found


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module whose input differs between ranks, so its gradients are partial sums."""
    _distribute(module, mesh, Replicate())
    forward = module.forward

    def on_own_tokens(*arguments: Any) -> Any:
        with _local_parameters(module, Partial()):
            return forward(*arguments)

    module.forward = on_own_tokens


def _deal_out(experts: Any, mesh: DeviceMesh) -> None:
    """Give each rank an equal share of the experts, and send tokens to the ranks of theirs."""
    _distribute(experts, mesh, Shard(0))
    group, num_ranks = mesh.get_group(), mesh.size()
    experts.num_experts //= num_ranks
    compute: Callable[..., torch.Tensor] = experts.forward

    def dispatch(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs.

        Args:
            hidden: [tokens, hidden size], this rank's.
            chosen: int64 [tokens, top k], indices among all experts.
            weights: [tokens, top k].
        """
        # Rank r holds experts r * num_experts to (r + 1) * num_experts, so sorting the (token,
        # expert) pairs by expert also groups them by destination.
        order = chosen.flatten().argsort(stable=True)
        expert = chosen.flatten()[order]
        splits = exchanged_counts(expert // experts.num_experts, num_ranks, group)
        rows = all_to_all(hidden[order // chosen.shape[1]], *splits, group)
        local = all_to_all(expert % experts.num_experts, *splits, group)
        # A row of zeros for the first expert: a rank that receives no token still produces (zero)
        # gradients, which the reduction on the other ranks waits for.
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        local = torch.cat([local, local.new_zeros(1)])
        with _local_parameters(experts, Shard(0)):
            made = compute(rows, local[:, None], rows.new_ones(len(rows), 1))[:-1]
        returned = all_to_all(made, splits[1], splits[0], group)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        each = returned[back].reshape(*chosen.shape, hidden.shape[1])
        total: torch.Tensor = (each * weights[..., None]).sum(dim=1)
        return total.to(hidden.dtype)

    experts.forward = dispatch


def exchanged_counts(
    ranks: torch.Tensor, num_ranks: int, group: dist.ProcessGroup
) -> tuple[list[int], list[int]]:
    """Return how many rows this rank sends to each rank, and receives from each (collective).

    Args:
        ranks: int64 [rows], the rank that each row goes to.
        num_ranks: of the group.
        group: the ranks that exchange rows.
    """
    # `bincount` would wait for the device to learn the size of its result; here it waits once.
    sent = ranks.new_zeros(num_ranks).scatter_add_(0, ranks, torch.ones_like(ranks))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to_each, from_each = torch.stack([sent, received]).tolist()
    return to_each, from_each


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        spread = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        requires_grad = parameter.requires_grad
        module.register_parameter(name, nn.Parameter(spread, requires_grad=requires_grad))


@contextmanager
def _local_parameters(module: nn.Module, gradient: Placement) -> Iterator[None]:
    """Replace a module's parameters by their local tensors within the block.

    Args:
        module: its direct parameters are DTensors over one mesh dimension.
        gradient: placement of the local gradients: `Partial` if they are to be summed over ranks,
            `Shard` if each is the gradient of the rank's own part.
    """
    # A linear layer without a bias stores None for it.
    kept: dict[str, Any] = {name: p for name, p in module._parameters.items() if p is not None}
    for name, parameter in kept.items():
        module._parameters[name] = parameter.to_local(grad_placements=[gradient])
    try:
        yield
    finally:
        module._parameters.update(kept)
