"""Agents of any framework, played against the policy through an OpenAI-compatible endpoint.

The names below are imported when they are asked for: `OpenAIServer` and what it needs serve as well
where there is neither a store nor a sampler.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.gateway.endpoint import AgentEndpoint, AgentFunction, load_agent
    from agentrl.gateway.gateway import Gateway
    from agentrl.gateway.sampler import AgentSampler
    from agentrl.gateway.server import OpenAIServer

__all__ = [
    "AgentEndpoint",
    "AgentFunction",
    "AgentSampler",
    "Gateway",
    "OpenAIServer",
    "load_agent",
]

_PLACES = {
    "AgentEndpoint": "agentrl.gateway.endpoint",
    "AgentFunction": "agentrl.gateway.endpoint",
    "AgentSampler": "agentrl.gateway.sampler",
    "Gateway": "agentrl.gateway.gateway",
    "OpenAIServer": "agentrl.gateway.server",
    "load_agent": "agentrl.gateway.endpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'agentrl.gateway' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
