"""Losses and advantages as pure functions."""

from typing import TYPE_CHECKING, Any

from agentrl.algorithms.advantages import group_advantages

if TYPE_CHECKING:
    from agentrl.algorithms.losses import LossSettings, policy_loss

__all__ = ["LossSettings", "group_advantages", "policy_loss"]


def __getattr__(name: str) -> Any:
    """Import the losses, which need torch, when they are asked for: `agentrl.data` runs without."""
    if name in __all__:
        from agentrl.algorithms import losses  # noqa: PLC0415

        return getattr(losses, name)
    raise AttributeError(f"module 'agentrl.algorithms' has no attribute {name!r}")
