"""AgentRL: reinforcement learning for language-model agents, decoupled through a document store."""

__version__ = "0.1.0"
