"""Agents that people already have: `AgentTrainer`, its engines, and hosts that play the agents."""

from agentrl.integrations.agent_trainer import AgentTrainer
from agentrl.integrations.aworld.agent_loop import AworldAgentLoop
from agentrl.integrations.aworld.building import Endpoint
from agentrl.integrations.trainer_processor import TrainerProcessor

__all__ = ["AgentTrainer", "AworldAgentLoop", "Endpoint", "TrainerProcessor"]
