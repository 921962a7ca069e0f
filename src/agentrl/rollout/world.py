"""Scores of rollouts by what was done: with their tools while these are open, later from the store."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ScorerDefect, ScoringError
from agentrl.rewards.registered_scoring import rollout_of
from agentrl.rewards.rollout_view import Rollout, RolloutWorld
from agentrl.rollout.async_sampler import AsyncSampler, RolloutResult
from agentrl.runtime.retries import retried
from agentrl.schema import MCPTask, Score, ToolResult
from agentrl.tools import McpToolBox

SCORING_PAUSES = (1.0, 5.0, 20.0)
"""Seconds between the attempts to score a rollout whose tools are kept open for it."""


class _Outage(Exception):
    """A scorer could not decide, and may if it is asked again."""

    def __init__(self, error: ScoringError) -> None:
        super().__init__(error)
        self.error = error


class ToolWorld:
    """The open tools of a rollout, for its scorer."""

    def __init__(self, tools: McpToolBox, folder: Path) -> None:
        self._tools = tools
        self._folder = folder

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool in the rollout's session."""
        return await self._tools.call_for_scorer(tool, arguments)

    async def folder(self) -> Path:
        """Return a copy of the directories of the rollout's servers, as they are now."""
        return await self._tools.copy_folders(self._folder)


async def judged_in_world(
    sampler: AsyncSampler[MCPTask], result: RolloutResult, tools: McpToolBox
) -> Score | ScoringError:
    """Return the score of a rollout whose tools are open, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="agentrl-scored-") as folder:
        world = ToolWorld(tools, Path(folder))

        async def attempt() -> Score:
            try:
                return await score_rollout(sampler, result, result.outcome, world)
            except ScorerDefect:
                raise
            except ScoringError as error:
                raise _Outage(error) from error

        try:
            return await retried(attempt, on=_Outage, pauses=SCORING_PAUSES)
        except _Outage as outage:
            return outage.error
        except ScoringError as error:
            return error


async def score_rollout(
    sampler: AsyncSampler[MCPTask],
    result: RolloutResult,
    reason: str,
    world: RolloutWorld | None = None,
) -> Score:
    """Score a rollout with its task's scorer, perhaps in a process that only scores it.

    `reason` says why there is no answer; `world` has the tools, as long as they are open.
    """
    context, task = sampler.context, sampler.task
    rollout: Rollout | None = None
    if context.judges_rollouts(task):
        turns = sampler.turns or await context.store.turns.get_many(sampler.record.turns)
        rollout = rollout_of(
            turns, outcome=result.outcome, columns=task.columns, reward=result.reward
        )
        rollout.world = world
    return await context.score(task, result.final_answer, no_answer=reason, rollout=rollout)
