"""Training of agents that people already have: `AgentTrainer` and its engines.

What users import stands here; `AworldAgentLoop` needs no AWorld until its agents are built.
"""

from agentrl.integrations.agent_trainer import AgentTrainer
from agentrl.integrations.aworld.agent_loop import AworldAgentLoop
from agentrl.integrations.trainer_processor import TrainerProcessor

__all__ = ["AgentTrainer", "AworldAgentLoop", "TrainerProcessor"]
