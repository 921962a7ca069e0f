"""Floating-point operations of training a row, and what devices can do at best.

Counted as is usual for model FLOPs utilization (2204.02311, appendix B): forward and backward of
the computation that the model asks for, without what is computed again to save memory.
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
"""Dense bfloat16 peaks from the vendor's data sheets; the first name that fits counts."""


@dataclass(frozen=True)
class FlopCount:
    """What one token, one visible pair and one position at the LM head cost, both directions."""

    per_token: float
    """6 a parameter outside the embedding and the head, of experts those a token goes to; 4 where it
    is frozen."""
    per_pair: float
    """12 * layers * heads * head size for every (query, key) that see each other."""
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
        """Return the work of a visible pair over that of a token outside attention."""
        return self.per_pair / self.per_token

    def row(self, row: PackedRow) -> float:
        """Return the operations of one forward and backward pass of a row."""
        num_pairs = float(row.positions.sum()) + row.num_tokens
        num_head_positions = len(np.unique(row.sources))
        return (
            self.per_token * row.num_tokens
            + self.per_pair * num_pairs
            + self.per_head_position * num_head_positions
        )


def _cost(parameter: torch.Tensor) -> float:
    """Return the operations a weight: forward, gradient of its input, and its own gradient."""
    return 6.0 if parameter.requires_grad else 4.0


def peak_tflops(device: torch.device) -> float | None:
    """Return the device's dense bfloat16 peak in TFLOP/s, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _DENSE_BF16_TFLOPS.items() if key in name), None)
