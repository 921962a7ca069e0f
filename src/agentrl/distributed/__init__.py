"""Ranks, their mesh, and sharding."""

from agentrl.distributed.mesh import MeshShape
from agentrl.distributed.ranks import Ranks, joined_ranks
from agentrl.distributed.sharding import (
    clip_gradients,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
    shard_model,
    squared_norms,
)

__all__ = [
    "MeshShape",
    "Ranks",
    "clip_gradients",
    "full_optimizer_state",
    "full_state_dict",
    "joined_ranks",
    "load_full_optimizer_state",
    "load_full_state_dict",
    "shard_model",
    "squared_norms",
]
