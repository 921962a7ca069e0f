"""One slot to one Record: samplers, their scheduler, and the questions they are asked."""

from agentrl.rollout.base import AsyncSampler, LimitReached, RolloutResult
from agentrl.rollout.context import RolloutContext, Scoring
from agentrl.rollout.conversation import Conversation, Prompt
from agentrl.rollout.mcp_sampler import MCPSampler
from agentrl.rollout.registry import register_sampler, sampler_class_for
from agentrl.rollout.scheduler import SamplingScheduler
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
