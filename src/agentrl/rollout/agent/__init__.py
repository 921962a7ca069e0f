"""Agents of any framework as rollouts: they call the policy over HTTP and are recorded."""

from agentrl.rollout.agent.agent_command import configured_agent
from agentrl.rollout.agent.agent_loading import AgentFunction, load_agent
from agentrl.rollout.agent.agent_sampler import AgentEndpointServer, AgentSampler
from agentrl.rollout.agent.agent_thread import AgentThread
from agentrl.schema.agent_endpoint import AgentEndpoint

__all__ = [
    "AgentEndpoint",
    "AgentEndpointServer",
    "AgentFunction",
    "AgentSampler",
    "AgentThread",
    "configured_agent",
    "load_agent",
]
