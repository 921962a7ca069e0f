"""Training of existing agents: `AgentTrainer` and its engines.

This package exports what users import. `AworldAgentLoop` requires AWorld only when it builds
agents.
"""

from agentrl.plugins.integrations.agent_trainer import AgentTrainer
from agentrl.plugins.integrations.aworld.agent_loop import AworldAgentLoop
from agentrl.plugins.integrations.trainer_processor import TrainerProcessor

__all__ = ["AgentTrainer", "AworldAgentLoop", "TrainerProcessor"]
