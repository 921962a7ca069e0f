"""Agents of any framework, played against the policy through an OpenAI-compatible endpoint."""

from agentrl.gateway.endpoint import AgentEndpoint, AgentFunction, load_agent
from agentrl.gateway.sampler import AgentSampler
from agentrl.gateway.server import Gateway

__all__ = ["AgentEndpoint", "AgentFunction", "AgentSampler", "Gateway", "load_agent"]
