"""Scorers, the judge, and answer extraction; importing this package registers the built-in scorers."""

from agentrl.rewards import choice_scorers as _choice  # noqa: F401  registers `choice`, `calls`
from agentrl.rewards import code_scorers as _code  # noqa: F401  registers `python_tests`
from agentrl.rewards import judge as _judge  # noqa: F401  registers `agentcpm` and `asearcher`
from agentrl.rewards import math_pool as _math_pool  # noqa: F401  registers `math`
from agentrl.rewards.agent_config import AgentConfig
from agentrl.rewards.code_runs import CodeRun, run_python
from agentrl.rewards.factory import (
    MCPScorerFactory,
    Scorer,
    Verdict,
    load_scorer_module,
)
from agentrl.rewards.registered_scoring import RegisteredScoring, extract_answer
from agentrl.rewards.rollout_view import Rollout
from agentrl.rewards.text_scorers import gaia_reward_func  # registers `exact`, `em` and `gaia`
from agentrl.schema import GroundTruth

__all__ = [
    "AgentConfig",
    "CodeRun",
    "GroundTruth",
    "MCPScorerFactory",
    "RegisteredScoring",
    "Rollout",
    "Scorer",
    "Verdict",
    "extract_answer",
    "gaia_reward_func",
    "load_scorer_module",
    "run_python",
]
