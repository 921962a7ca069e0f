"""Limits with which the embedded engine samples a step in about two minutes.

Input: the shape of the model, from its config.json, and the cores of this machine. Output: sizes. The
estimate is the arithmetic of decoding and only chooses defaults.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from agentrl.models.checkpoints.architectures import decoder_config, raw_config

SAMPLING_SECONDS = 120.0
"""Time in which a step should be sampled, if every reply has the maximum length."""
_FLOPS_PER_CORE = 1e10
"""Operations per second and core that batched decoding reaches in float32: 134 million weights at
74 tokens per second on two cores; 57 were measured beside other work."""
MIN_REPLY_TOKENS = 256
"""Length that a short answer with its reasoning needs; a step gets fewer groups instead."""
MIN_GROUPS = 2


@dataclass(frozen=True)
class CpuLimits:
    """Sizes of a step on a CPU."""

    tokens_per_second: float
    """Estimated tokens per second of the embedded engine, all conversations together."""
    max_new_tokens: int
    """A power of two, so that it is the same on similar machines."""
    groups_per_step: int


def cpu_limits(
    model_path: Path, *, num_threads: int | None, num_generations: int, num_groups: int
) -> CpuLimits | None:
    """Return the limits for a model; None if its config.json does not give its shape."""
    num_weights = _weights_per_token(model_path)
    if num_weights is None:
        return None
    num_cores = num_threads or len(os.sched_getaffinity(0))
    rate = num_cores * _FLOPS_PER_CORE / (2 * num_weights)
    budget = rate * SAMPLING_SECONDS
    fitting = int(budget / (num_groups * num_generations))
    length = max(MIN_REPLY_TOKENS, 1 << max(0, fitting.bit_length() - 1))
    groups = int(budget / (length * num_generations))
    return CpuLimits(rate, length, min(num_groups, max(MIN_GROUPS, groups)))


def _weights_per_token(model_path: Path) -> int | None:
    """Return about how many weights one token is multiplied with; None if the shape is unknown."""
    config = decoder_config(raw_config(model_path))
    hidden, layers, vocabulary, heads = (
        getattr(config, name, None)
        for name in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    )
    if not (hidden and layers and vocabulary and heads):
        return None
    kv_share = (getattr(config, "num_key_value_heads", None) or heads) / heads
    experts = getattr(config, "num_experts_per_tok", None)
    inner = getattr(config, "moe_intermediate_size", None) if experts else None
    width = (experts or 1) * (inner or getattr(config, "intermediate_size", None) or 4 * hidden)
    per_layer = hidden * hidden * (2 + 2 * kv_share) + 3 * hidden * width
    return int(layers * per_layer + vocabulary * hidden)
