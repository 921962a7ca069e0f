"""One slot to one Record: samplers, their scheduler, and the questions they are asked.

The names below are imported when they are asked for: who only reads questions (`datasets`,
`entries`) needs neither tools nor a store.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.rollout.async_sampler import AsyncSampler, LimitReached, RolloutResult
    from agentrl.rollout.context import RolloutContext, Scoring
    from agentrl.rollout.conversation import Conversation, Prompt
    from agentrl.rollout.mcp_sampler import MCPSampler
    from agentrl.rollout.registry import register_sampler, sampler_class_for
    from agentrl.rollout.worker.scheduler import SamplingScheduler
    from agentrl.schema import register_task_type

__all__ = [
    "AsyncSampler",
    "Conversation",
    "LimitReached",
    "MCPSampler",
    "Prompt",
    "RolloutContext",
    "RolloutResult",
    "SamplingScheduler",
    "Scoring",
    "register_sampler",
    "register_task_type",
    "sampler_class_for",
]

_PLACES = {
    "AsyncSampler": "agentrl.rollout.async_sampler",
    "Conversation": "agentrl.rollout.conversation",
    "LimitReached": "agentrl.rollout.async_sampler",
    "MCPSampler": "agentrl.rollout.mcp_sampler",
    "Prompt": "agentrl.rollout.conversation",
    "RolloutContext": "agentrl.rollout.context",
    "RolloutResult": "agentrl.rollout.async_sampler",
    "SamplingScheduler": "agentrl.rollout.worker.scheduler",
    "Scoring": "agentrl.rollout.context",
    "register_sampler": "agentrl.rollout.registry",
    "register_task_type": "agentrl.schema",
    "sampler_class_for": "agentrl.rollout.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'agentrl.rollout' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
