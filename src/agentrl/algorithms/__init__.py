"""Losses and advantages as pure functions."""

from agentrl.algorithms.advantages import group_advantages
from agentrl.algorithms.losses import LossSettings, policy_loss

__all__ = ["LossSettings", "group_advantages", "policy_loss"]
