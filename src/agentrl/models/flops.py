"""Floating-point operations for training on a row, and the peak rate of a device.

Counts follow the convention of model FLOPs utilization (Chowdhery et al., arXiv 2204.02311,
appendix B): forward and backward passes as the model defines them, without recomputation that saves
memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from agentrl.data.rows import PackedRow
from agentrl.models.policy import PolicyModel
from agentrl.models.vision.image_encoders import reads_images
from agentrl.runtime.gpus import gpu_model


@dataclass(frozen=True)
class FlopCount:
    """Operations per token, visible pair and LM-head position, forward and backward together."""

    per_token: float
    """6 per parameter outside the embedding, the head and an image encoder, which few tokens pass (4
    for a frozen one); of the experts only the share that a token is routed to."""
    per_pair: float
    """12 * layers * heads * head size, for each (query, key) pair that the mask lets through. Layers
    with a window count per token instead, as if every token saw a full one."""
    per_head_position: float
    """6 * hidden size * vocabulary; 4 if the head is frozen."""

    @classmethod
    def of(cls, policy: PolicyModel) -> Self:
        """Read the costs off a model, sharded or not."""
        config: Any = policy.model.config.get_text_config()
        embedding: Any = policy.model.get_input_embeddings()
        head: Any = policy.model.get_output_embeddings()
        tables = {id(embedding.weight), id(head.weight)}
        per_token = 0.0
        for name, parameter in policy.named_parameters():
            is_text = ".language_model." in name or not reads_images(policy.model.config)
            if id(parameter) in tables or not is_text:
                continue
            share = 1.0
            if ".experts." in name:  # stacked: the first dimension counts them
                share = min(1.0, _experts_per_token(config) / parameter.shape[0])
            per_token += _flops_per_weight(parameter) * parameter.numel() * share
        per_pair = 0.0
        for layer in _attention_layers(policy):
            size = getattr(layer, "head_dim", 0)
            sizes = getattr(layer, "qk_head_dim", size) + getattr(layer, "v_head_dim", size)
            cost = 6.0 * config.num_attention_heads * sizes
            window = getattr(layer, "sliding_window", None)
            if window is None:
                per_pair += cost
            else:
                per_token += cost * window
        return cls(
            per_token=per_token,
            per_pair=per_pair,
            per_head_position=_flops_per_weight(head.weight)
            * config.hidden_size
            * config.vocab_size,
        )

    @property
    def attention_cost(self) -> float:
        """The cost of one visible pair, in units of one token's cost outside attention."""
        return self.per_pair / self.per_token

    def row(self, row: PackedRow) -> float:
        """Return the operations of one forward and backward pass of a row."""
        # A token at position p sees p ancestors and itself.
        num_pairs = float(row.positions.sum()) + row.num_tokens
        num_head_positions = len(np.unique(row.sources))
        return (
            self.per_token * row.num_tokens
            + self.per_pair * num_pairs
            + self.per_head_position * num_head_positions
        )


def _attention_layers(policy: PolicyModel) -> Iterator[Any]:
    """Yield the modules that compute attention; transformers gives each a factor on its scores."""
    for module in policy.model.modules():
        if hasattr(module, "scaling") and hasattr(module, "layer_idx"):
            yield module


def _experts_per_token(config: Any) -> int:
    """Return how many experts a token is routed to; families name it differently."""
    names = ("num_experts_per_tok", "top_k_experts", "moe_k")
    return int(next(getattr(config, name) for name in names if getattr(config, name, None)))


def _flops_per_weight(parameter: torch.Tensor) -> float:
    """Return the operations per weight: 2 each for forward, input gradient and weight gradient."""
    return 6.0 if parameter.requires_grad else 4.0


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's dense bfloat16 peak in TFLOP/s, or None if it is not in the table."""
    if device.type != "cuda":
        return None
    model = gpu_model(torch.cuda.get_device_name(device))
    return None if model is None else model.tflops
