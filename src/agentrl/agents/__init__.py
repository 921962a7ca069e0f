"""Agents that people already have: `AgentTrainer`, its engines, and hosts that play the agents."""

from agentrl.agents.building import Endpoint
from agentrl.agents.loops import AworldAgentLoop
from agentrl.agents.processor import TrainerProcessor
from agentrl.agents.trainer import AgentTrainer

__all__ = ["AgentTrainer", "AworldAgentLoop", "Endpoint", "TrainerProcessor"]
