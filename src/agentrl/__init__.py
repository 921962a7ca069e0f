"""AgentRL: reinforcement learning for language-model agents, decoupled through a document store."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.integrations import AgentTrainer

__all__ = ["AgentTrainer", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `AgentTrainer` when it is asked for: a sampler never needs it."""
    if name == "AgentTrainer":
        from agentrl.integrations import AgentTrainer  # noqa: PLC0415

        return AgentTrainer
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
