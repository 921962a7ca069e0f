"""Training of existing agents, for users: the public face of `agentrl.plugins.integrations`."""

from agentrl.plugins.integrations import AgentTrainer, AworldAgentLoop, TrainerProcessor

__all__ = ["AgentTrainer", "AworldAgentLoop", "TrainerProcessor"]
