"""Training of existing agents: `AgentTrainer` and its engines.

This package exports what users import. `AworldAgentLoop` requires AWorld only when it builds
agents.
"""

from agentrl.integrations.agent_trainer import AgentTrainer
from agentrl.integrations.aworld.agent_loop import AworldAgentLoop
from agentrl.integrations.trainer_processor import TrainerProcessor

__all__ = ["AgentTrainer", "AworldAgentLoop", "TrainerProcessor"]
