"""Scorers and judges."""

from agentrl.rewards import builtin as _builtin  # noqa: F401  registers the built-in scorers
from agentrl.rewards.agent_config import AgentConfig
from agentrl.rewards.answers import extract_answer
from agentrl.rewards.factory import MCPScorerFactory, Scorer, Verdict, load_scorer_module
from agentrl.rewards.gaia import gaia_reward_func  # registers the scorer `gaia`, too
from agentrl.rewards.truth import GroundTruth

__all__ = [
    "AgentConfig",
    "GroundTruth",
    "MCPScorerFactory",
    "Scorer",
    "Verdict",
    "extract_answer",
    "gaia_reward_func",
    "load_scorer_module",
]
