"""Desktop tasks in a run: `--sampler_module` and `--scorer_module` of this file.

The answer of a question is the state of the desktop that it asks for. The answer of a rollout is the
state in which it leaves its desktop, read from the desktop itself: what the model says at the end
decides nothing, and every Record keeps the state by which it was scored.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # wherever the command was started
from agentrl.errors import ToolError
from agentrl.rewards import GroundTruth, MCPScorerFactory, Verdict
from agentrl.rollout import MCPSampler, RolloutResult, register_sampler
from agentrl.schema import MCPTask
from agentrl.tools import ToolBox
from examples.desktop.end_state import unmet


@register_sampler(MCPTask)
class DesktopSampler(MCPSampler):
    """Runs a task with tools and takes the desktop's state as its answer."""

    async def close_tools(self, result: RolloutResult, tools: ToolBox) -> RolloutResult:
        """Read the state before the desktop ends."""
        state = await tools.call("desktop_state", {})  # also after the rollout's time is over
        if state.is_error:
            raise ToolError(f"desktop_state: {state.content}")
        return replace(result, final_answer=state.content)


@MCPScorerFactory.register_scorer("desktop", needs_answer=True)
def desktop_scorer(answer: str, truth: GroundTruth) -> Verdict:
    """Score 1 if the desktop is in the state that the task asks for, else 0."""
    try:
        state = json.loads(answer)
    except ValueError:
        return Verdict(0.0, detail="this is no state of a desktop")
    lacks = unmet(state, truth.answer)
    return Verdict(float(not lacks), detail="; ".join(lacks))
