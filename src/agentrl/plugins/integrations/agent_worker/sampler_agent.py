"""The user's agent and reward function for a sampler; called by the run's generated module."""

from pathlib import Path
from typing import Any

from agentrl.errors import AgentWorkerError, ScorerDefect, ScoringError, UserCodeError
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.plugins.integrations.question_rows import SCORER
from agentrl.rewards import GroundTruth, MCPScorerFactory, Rollout
from agentrl.rollout.agent import AgentFunction
from agentrl.rollout.agent.agent_loading import IS_ELSEWHERE
from agentrl.schema import AgentResult, MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint


def agent_in_workers(settings_path: Path) -> AgentFunction:
    """Return the agent of a settings file, and register its reward function as a scorer.

    The workers end with this process.
    """
    workers = AgentWorkerPool.load(settings_path)
    if workers.settings.reward is not None:
        _register_reward(workers)

    async def play(task: MCPTask, endpoint: AgentEndpoint) -> AgentResult:
        return await workers.run(task, endpoint)

    # Scores that the agent returns are named after it.
    setattr(play, IS_ELSEWHERE, True)
    play.__name__ = (workers.settings.agent or {}).get("name", "agent")
    return play


def _register_reward(workers: AgentWorkerPool) -> None:
    form = workers.settings.reward_form

    async def ask(arguments: dict[str, Any]) -> float:
        try:
            return await workers.reward(arguments)
        except AgentWorkerError as error:
            raise ScoringError(f"reward_func: {error}") from error
        except UserCodeError as error:
            text = f"reward_func: {error}"
            raise ScorerDefect(text, kind=text) from error

    async def score(answer: str, truth: GroundTruth) -> float:
        if form == "aworld":
            return await ask({**truth.answer, "solution_str": answer})
        return await ask({"positional": [answer, truth.model_dump(mode="json")]})

    async def score_rollout(answer: str | None, truth: GroundTruth, rollout: Rollout) -> float:
        given = [answer, truth.model_dump(mode="json"), rollout.to_json()]
        return await ask({"positional": given})

    # The workers are separate processes already, and those that run rollouts also compute rewards.
    function = score_rollout if form == "rollout" else score
    MCPScorerFactory.register_scorer(SCORER, function, isolated=False)
