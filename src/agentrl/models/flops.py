"""Floating-point operations for training on a row, and the peak rates of devices.

Counts follow the convention of model FLOPs utilization (Chowdhery et al., arXiv 2204.02311,
appendix B): forward and backward passes as the model defines them, without recomputation that saves
memory.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from agentrl.data.rows import PackedRow
from agentrl.models.policy import PolicyModel

_DENSE_BF16_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
}
"""Dense bfloat16 peaks from the vendor's data sheets. The first key within the device's name wins,
so variants precede the plain name."""


@dataclass(frozen=True)
class FlopCount:
    """Operations per token, visible pair and LM-head position, forward and backward together."""

    per_token: float
    """6 per parameter outside the embedding and the head (4 for a frozen one); of the experts only
    the share that a token is routed to."""
    per_pair: float
    """12 * layers * heads * head size, for each (query, key) pair that the mask lets through."""
    per_head_position: float
    """6 * hidden size * vocabulary; 4 where the head is frozen."""

    @classmethod
    def of(cls, policy: PolicyModel) -> Self:
        """Read the costs off a model, sharded or not."""
        config: Any = policy.model.config
        embedding: Any = policy.model.get_input_embeddings()
        head: Any = policy.model.get_output_embeddings()
        tables = {id(embedding.weight), id(head.weight)}
        per_token = 0.0
        for name, parameter in policy.named_parameters():
            if id(parameter) in tables:
                continue
            used, held = 1, 1
            if ".experts." in name:
                used, held = config.num_experts_per_tok, config.num_experts
            per_token += _cost(parameter) * (parameter.numel() * used // held)
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        return cls(
            per_token=per_token,
            per_pair=12.0 * config.num_hidden_layers * config.num_attention_heads * head_dim,
            per_head_position=_cost(head.weight) * config.hidden_size * config.vocab_size,
        )

    @property
    def attention_cost(self) -> float:
        """Return the cost of one visible pair, in units of one token's cost outside attention."""
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


def _cost(parameter: torch.Tensor) -> float:
    """Return the operations per weight: 2 each for forward, input gradient and weight gradient."""
    return 6.0 if parameter.requires_grad else 4.0


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's dense bfloat16 peak in TFLOP/s, or None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _DENSE_BF16_TFLOPS.items() if key in name), None)
