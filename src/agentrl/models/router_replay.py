"""Makes routers of mixture-of-experts models use the server's choice of experts.

Server and trainer compute the same token with different precision, batches and kernels, so their
routers sometimes choose different experts; the trained policy then differs from the one that
sampled. Replaying the server's choice removes this difference (rollout routing replay, R3, arXiv
2510.11370). The choice of experts is fixed; their weights come from the trainer's router and carry
its gradient.

Shape legend: N tokens, L layers, K experts per token, E experts.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, softmax
from transformers import PreTrainedModel

from agentrl.errors import ConfigError

ROUTED_EXPERTS = "routed_experts"
"""Keyword argument that carries a row's choices to the decoder layers: int64 [N, L, K]; at -1, the
layer's own router chooses.
"""


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module is a mixture of experts: a router (`gate`) and its experts."""
    return hasattr(module, "experts") and hasattr(module, "gate")


_KNOWN_ROUTERS = frozenset(
    {"OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter"}
)
"""Classes of routers that compute as `_route` does."""


def make_routers_replay(model: PreTrainedModel) -> None:
    """Make a model's routers honor the keyword `ROUTED_EXPERTS`, in place."""
    base: Any = model.base_model
    for number, layer in enumerate(base.layers):
        block = getattr(layer, "mlp", None)
        if block is not None and is_mixture(block):
            router = type(block.gate).__name__
            if router not in _KNOWN_ROUTERS:
                raise ConfigError(
                    f"--router_replay does not support {router}; omit the flag (supported: "
                    f"{', '.join(sorted(_KNOWN_ROUTERS))})"
                )
            layer.register_forward_pre_hook(partial(_set_replayed, number), with_kwargs=True)
            _replace_forward(block.gate)


def _replace_forward(gate: Any) -> None:
    gate.replayed = None
    gate.forward = partial(_route, gate)


def _set_replayed(number: int, layer: Any, arguments: Any, keywords: dict[str, Any]) -> None:
    # A hook on each layer rather than on the model: gradient checkpointing runs layers again, and
    # by then another row's choices may be set.
    choices = keywords.get(ROUTED_EXPERTS)
    layer.mlp.gate.replayed = None if choices is None else choices[:, number]


def _route(gate: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [N, E], and weights and indices [N, K] of the chosen experts.

    Computes like Qwen3-MoE's router, except that a float64 model stays in float64.
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
