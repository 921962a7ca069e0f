"""Split a policy's weights and activations over the `tp` and `ep` dimensions of a mesh.

Tensor parallelism is torch's, with sequence parallelism between the blocks: weights are split by
columns and rows, activations between the blocks by tokens, embedding and LM head by vocabulary.
Parts of layers with another structure (scans, latent attention, sinks, shared experts) are whole on
every rank and compute the rank's own tokens.

Experts are distributed whole over the product of `ep` and `tp`: with sequence parallelism, the ranks
along both dimensions hold different tokens at that point. Each token is sent to the ranks of its
experts; there is no capacity limit, so no token is dropped.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.distributed.collectives import all_to_all
from agentrl.errors import ConfigError
from agentrl.models.attention.attention_registry import computes_trees
from agentrl.models.attention.backend import SEES_OWN_TOKENS
from agentrl.models.lora import BASE, adapter_parts
from agentrl.models.policy import PolicyModel
from agentrl.models.router_replay import is_mixture
from agentrl.models.rows.row_split import RowSplit


def parallelize(policy: PolicyModel, mesh: DeviceMesh | None) -> PolicyModel:
    """Split a policy over `tp`, `ep` and `cp` (in place). Apply FSDP2 afterwards.

    Args:
        policy: every rank holds the same weights, or all parameters are on the meta device.
        mesh: see `distributed.mesh`; None for a single process.
    """
    if mesh is None:
        return policy
    model = policy.model
    check_divisible(model, tp=mesh["tp"].size(), ep=mesh["ep"].size())
    policy.split = RowSplit(mesh)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if mesh["experts"].size() > 1:
        for module in model.modules():
            if _has_known_experts(module):
                _distribute_experts(module.experts, mesh["experts"])
    if mesh["tp"].size() > 1:
        _split_tensors(model, mesh["tp"])
        # The model's own attention and scans would see only this rank's tokens.
        if any(map(_follows_paths, model.modules())) and not computes_trees(model):
            raise ConfigError(
                f"--tp_size: layers of {model.config.model_type} models cannot be divided when "
                "turns train one by one (--merge none); use 1"
            )
    for name in frozen:  # `SequenceParallel` recreates norm weights with requires_grad=True
        model.get_parameter(name).requires_grad = False
    return policy


def check_divisible(model: Any, *, tp: int, ep: int) -> None:
    """Refuse to divide layers with an unknown structure."""
    family = model.config.model_type
    if tp > 1 and getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
        raise ConfigError(
            f"--tp_size: each layer of {family} has its own embeddings, which cannot be divided; "
            "use 1"
        )
    if tp > 1:
        owners = (model.base_model, *model.base_model.layers)
        own = {name for owner in owners for name, _ in owner.named_parameters(recurse=False)}
        if own:
            raise ConfigError(
                f"--tp_size: {', '.join(sorted(own))} in layers of {family} belongs to no part "
                "that can be divided; use 1"
            )
    if ep > 1:
        for block in model.modules():
            if hasattr(block, "experts") and not _has_known_experts(block):
                raise ConfigError(
                    f"--ep_size: the experts of {type(block).__name__} cannot be divided; use 1"
                )


_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_EXPERT_STACKS = {"gate_up_proj", "down_proj"}


def _is_known_attention(module: nn.Module) -> bool:
    """Return whether an attention layer can be split by heads."""
    if not {"q_proj", "o_proj"} <= _names(module) <= _ATTENTION:
        return False
    # A norm weight that all heads share is supported; one across all heads together is not.
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    return all(norm is None or norm.weight.numel() == module.head_dim for norm in norms)


def _has_known_experts(module: nn.Module) -> bool:
    """Return whether a module is a mixture whose stacks of experts can be distributed."""
    experts: Any = getattr(module, "experts", None)
    return is_mixture(module) and _names(experts) - {"act_fn"} == _EXPERT_STACKS


def _names(module: nn.Module) -> set[str]:
    """Return the names of a module's direct children and parameters."""
    children = {name for name, _ in module.named_children()}
    return children | {name for name, _ in module.named_parameters(recurse=False)}


def _split_tensors(model: Any, mesh: DeviceMesh) -> None:
    """Split attention, MLPs and vocabulary; everything else computes on each rank's own tokens."""
    base, embedding = model.base_model, model.get_input_embeddings()
    for layer in base.layers:
        plan = _layer_plan(layer)
        parallelize_module(layer, mesh, _with_adapters(layer, plan, mesh), src_data_rank=None)
        split_parts = {name.partition(".")[0] for name in plan}
        for name, part in layer.named_children():
            if name in split_parts:
                _gather_input(part, mesh)
            else:
                _compute_own_tokens(part, mesh)
    for part in base.children():
        if part is not embedding and part is not base.layers:
            _replicate(part, mesh)
    head = model.get_output_embeddings()
    is_tied = getattr(head, "weight", head) is getattr(embedding, "weight", embedding)
    if hasattr(embedding, "weight"):  # otherwise, another stage of a pipeline has it
        lookup = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(embedding, mesh, lookup, src_data_rank=None)
    if hasattr(head, "weight"):
        # The head's input is replicated; its logits stay split by vocabulary (see `vocabulary`).
        parallelize_module(head, mesh, ColwiseParallel(), src_data_rank=None)
    if is_tied:
        # `parallelize_module` replaced both parameters; both are now split by vocabulary rows.
        head.weight = embedding.weight


def _layer_plan(layer: Any) -> dict[str, ParallelStyle]:
    """Return the split of a layer's parts that have a known structure."""
    plan: dict[str, ParallelStyle] = {}
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is not None and _is_known_attention(attention):
        plan |= {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan["self_attn.o_proj"] = RowwiseParallel(output_layouts=Shard(1))
        for name in ("q_norm", "k_norm"):
            if hasattr(attention, name):
                # One weight serves the heads of all ranks. Unless its gradient is summed over them,
                # each rank trains its own copy, an error that the loss curve does not reveal.
                style = SequenceParallel(sequence_dim=2, use_local_output=True)
                plan[f"self_attn.{name}"] = style
    if mlp is not None and _names(mlp) == _MLP:
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        plan["mlp.down_proj"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


def _gather_input(part: nn.Module, mesh: DeviceMesh) -> None:
    """Give a part of a layer with split weights the tokens of all `tp` ranks."""

    def gather(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        own = arguments[0] if arguments else keywords["hidden_states"]
        hidden = DTensor.from_local(own, mesh, [Shard(1)], run_check=False)
        hidden = hidden.redistribute(placements=[Replicate()])
        if arguments:
            return (hidden, *arguments[1:]), keywords
        return arguments, {**keywords, "hidden_states": hidden}

    part.register_forward_pre_hook(gather, with_kwargs=True)


def _follows_paths(module: nn.Module) -> bool:
    """Return whether a layer that computes a rank's own tokens needs those of the other ranks."""
    # In transformers, attention has a `scaling`; other numbered modules are blocks or scans.
    is_block = isinstance(module, GradientCheckpointingLayer)
    is_scan = hasattr(module, "layer_idx") and not hasattr(module, "scaling") and not is_block
    return hasattr(module, SEES_OWN_TOKENS) or is_scan


def _compute_own_tokens(part: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a part of a layer, so that each `tp` rank computes its own tokens with it.

    Its path-following layers exchange tokens for heads (see `row_split`).
    """
    for module in part.modules():
        if hasattr(module, "scaling") and hasattr(module, "layer_idx"):
            setattr(module, SEES_OWN_TOKENS, True)
            module.register_forward_pre_hook(partial(_slice_positions, mesh), with_kwargs=True)
    _replicate(part, mesh)


def _slice_positions(
    mesh: DeviceMesh, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Cut the rotary embedding of a stretch down to this rank's tokens."""
    rotary = keywords.get("position_embeddings")
    if rotary is None:
        return None
    own = tuple(part.chunk(mesh.size(), dim=1)[mesh.get_local_rank()] for part in rotary)
    return arguments, {**keywords, "position_embeddings": own}


def _with_adapters(
    layer: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh
) -> dict[str, ParallelStyle]:
    """Return a layer's plan, extended to the adapters of its linear layers.

    If W is split by columns, A is replicated and B split by columns; if W is split by rows, A is
    split by rows and B replicated. Either way the ranks exchange only activations of width `rank`.
    """
    extended: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        module = layer.get_submodule(name)
        parts = adapter_parts(module)
        if parts is None:
            extended[name] = style
            continue
        extended[f"{name}.{BASE}"] = style
        down, up = parts
        if isinstance(style, ColwiseParallel):
            # Every rank computes A for all tokens. DTensor tracks that the gradient from B is
            # partial, since each rank holds some of B's columns, and sums it.
            _distribute(module.get_submodule(down), mesh, Replicate())
            extended[f"{name}.{up}"] = ColwiseParallel()
        else:
            extended[f"{name}.{down}"] = style
            _replicate(module.get_submodule(up), mesh)
    return extended


def _replicate(part: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate a module whose input differs between ranks, so its gradients are partial sums."""
    for module in part.modules():
        if not any(isinstance(own, DTensor) for own in module.parameters(recurse=False)):
            _distribute(module, mesh, Replicate())
    forward = part.forward

    def with_local_parameters(*arguments: Any, **keywords: Any) -> Any:
        with ExitStack() as stack:
            for module in part.modules():
                stack.enter_context(_local_parameters(module, mesh, Partial()))
            return forward(*arguments, **keywords)

    part.forward = with_local_parameters


def _distribute_experts(experts: Any, mesh: DeviceMesh) -> None:
    """Divide the experts equally over the ranks, and send each token to the ranks of its experts."""
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
        with _local_parameters(experts, mesh, Shard(0)):
            outputs = compute(rows, local[:, None], rows.new_ones(len(rows), 1))[:-1]
        returned = all_to_all(outputs, splits[1], splits[0], group)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        by_choice = returned[inverse].reshape(*chosen.shape, hidden.shape[1])
        total: torch.Tensor = (by_choice * weights[..., None]).sum(dim=1)
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
    # `bincount` would wait for the device to learn the size of its result; this waits only once.
    sent = ranks.new_zeros(num_ranks).scatter_add_(0, ranks, torch.ones_like(ranks))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to_each, from_each = torch.stack([sent, received]).tolist()
    return to_each, from_each


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        requires_grad = parameter.requires_grad
        module.register_parameter(name, nn.Parameter(distributed, requires_grad=requires_grad))


@contextmanager
def _local_parameters(module: nn.Module, mesh: DeviceMesh, gradient: Placement) -> Iterator[None]:
    """Replace a module's parameters over a mesh by their local tensors within the block.

    Args:
        module: whose direct parameters are replaced; those over other meshes stay.
        mesh: one-dimensional.
        gradient: placement of the local gradients: `Partial` if they are to be summed over ranks,
            `Shard` if each is the gradient of the rank's own part.
    """
    replaced: dict[str, Any] = {
        name: parameter
        for name, parameter in dict[str, Any](module._parameters).items()
        if isinstance(parameter, DTensor) and parameter.device_mesh == mesh
    }
    for name, parameter in replaced.items():
        module._parameters[name] = parameter.to_local(grad_placements=[gradient])
    try:
        yield
    finally:
        module._parameters.update(replaced)
