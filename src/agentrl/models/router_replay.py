"""Which experts a token of a mixture-of-experts model goes to: its router's choice, or a given one.

Server and trainer compute the same token in different precision, batches and kernels, so their
routers choose other experts now and then, and the trained policy is not quite the one that
sampled. Replaying the server's choice removes that (rollout routing replay, R3, arXiv 2510.11370):
which experts is given, how they are weighted is the trainer's router's, with its gradient.

Shape legend: N tokens, L layers, K experts a token, E experts.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, softmax

ROUTED_EXPERTS = "routed_experts"
"""Keyword under which a row's choices reach the decoder layers: int64 [N, L, K], -1 where the
layer's router chooses."""


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module sends tokens to experts of its own."""
    return hasattr(module, "experts") and hasattr(module, "gate")


def make_routers_replay(layers: Iterable[Any]) -> None:
    """Let the routers of decoder layers take choices from the layers' keyword `ROUTED_EXPERTS`."""
    for number, layer in enumerate(layers):
        if is_mixture(layer.mlp):
            layer.register_forward_pre_hook(partial(_hand_over, number), with_kwargs=True)
            layer.mlp.gate.replayed = None
            layer.mlp.gate.forward = partial(_route, layer.mlp.gate)


def _hand_over(number: int, layer: Any, arguments: Any, keywords: dict[str, Any]) -> None:
    # A hook of the layer and not of the model: it runs again where activations are recomputed.
    choices = keywords.get(ROUTED_EXPERTS)
    layer.mlp.gate.replayed = None if choices is None else choices[:, number]


def _route(gate: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [N, E], and weights and numbers [N, K] of the chosen experts.

    As Qwen3-MoE's router does it; in float64, where the model is, instead of float32.
    """
    logits = linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    exact = torch.promote_types(logits.dtype, torch.float32)
    probabilities = softmax(logits, dim=-1, dtype=exact)
    chosen = probabilities.topk(gate.top_k, dim=-1).indices
    if gate.replayed is not None:
        chosen = torch.where(gate.replayed >= 0, gate.replayed, chosen)
    weights = probabilities.gather(-1, chosen)
    if gate.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(logits.dtype), chosen
