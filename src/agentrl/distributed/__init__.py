"""The trainer's ranks: mesh, sharding, collectives, sharded state on disk. Does not know flags."""

from agentrl.distributed.host_memory import HostMemory
from agentrl.distributed.mesh import MeshShape, Ranks, joined_ranks
from agentrl.distributed.saving import StateWriter, read_state
from agentrl.distributed.sharding import (
    clip_gradients,
    full_state_dict,
    load_full_state_dict,
    load_sharded_state_dict,
    shard_model,
    sharded_state_dict,
    squared_norms,
    whole_tensor,
)
from agentrl.distributed.stages import Stages, whole_tensors

__all__ = [
    "HostMemory",
    "MeshShape",
    "Ranks",
    "Stages",
    "StateWriter",
    "clip_gradients",
    "full_state_dict",
    "joined_ranks",
    "load_full_state_dict",
    "load_sharded_state_dict",
    "read_state",
    "shard_model",
    "sharded_state_dict",
    "squared_norms",
    "whole_tensor",
    "whole_tensors",
]
