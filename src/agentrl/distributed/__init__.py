"""Ranks and sharding."""

from agentrl.distributed.ranks import Ranks, joined_ranks
from agentrl.distributed.sharding import (
    clip_gradients,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
    shard_model,
)

__all__ = [
    "Ranks",
    "clip_gradients",
    "full_optimizer_state",
    "full_state_dict",
    "joined_ranks",
    "load_full_optimizer_state",
    "load_full_state_dict",
    "shard_model",
]
