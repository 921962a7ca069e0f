"""Run rollouts: one claimed slot of a Task becomes one Record.

`AsyncSampler` and its subclasses run a rollout, `worker` claims slots for them, and `agent` records
the agents of other frameworks. Importing this package loads the sampler worker and the MCP SDK, so
code that only reads Records belongs in other packages (`evaluation`, `datasets.demonstrations`).
"""

from agentrl.renderers.conversation import Conversation, Prompt
from agentrl.rollout.async_sampler import AsyncSampler, BranchClosed, LimitReached, RolloutResult
from agentrl.rollout.context import RolloutContext, Scoring
from agentrl.rollout.mcp_sampler import MCPSampler
from agentrl.rollout.worker.scheduler import (
    SamplingScheduler,
    register_sampler,
    sampler_class_for,
)
from agentrl.schema import register_task_type

__all__ = [
    "AsyncSampler",
    "BranchClosed",
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
