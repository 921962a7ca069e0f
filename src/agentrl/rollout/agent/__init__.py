"""Agents of any framework, played against the policy through an OpenAI-compatible endpoint.

The names below are imported when they are asked for: `OpenAIServer` and what it needs serve as well
where there is neither a store nor a sampler.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.inference.dialects.openai_server import OpenAIServer
    from agentrl.rollout.agent.agent_sampler import AgentSampler
    from agentrl.rollout.agent.endpoint import AgentEndpoint, AgentFunction, load_agent
    from agentrl.rollout.agent.gateway import Gateway

__all__ = [
    "AgentEndpoint",
    "AgentFunction",
    "AgentSampler",
    "Gateway",
    "OpenAIServer",
    "load_agent",
]

_PLACES = {
    "AgentEndpoint": "agentrl.rollout.agent.endpoint",
    "AgentFunction": "agentrl.rollout.agent.endpoint",
    "AgentSampler": "agentrl.rollout.agent.agent_sampler",
    "Gateway": "agentrl.rollout.agent.gateway",
    "OpenAIServer": "agentrl.inference.dialects.openai_server",
    "load_agent": "agentrl.rollout.agent.endpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'agentrl.rollout.agent' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
