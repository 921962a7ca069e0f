"""The user's agent and reward function for a sampler; called by the run's generated module."""

from pathlib import Path

from agentrl.errors import AgentWorkerError, ScorerDefect, ScoringError, UserCodeError
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.plugins.integrations.question_rows import SCORER
from agentrl.rewards import GroundTruth, MCPScorerFactory
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
    is_aworld = workers.settings.reward_form == "aworld"

    async def score(answer: str, truth: GroundTruth) -> float:
        if is_aworld:
            arguments = {**truth.answer, "solution_str": answer}
        else:
            arguments = {"positional": [answer, truth.model_dump(mode="json")]}
        try:
            return await workers.reward(arguments)
        except AgentWorkerError as error:
            raise ScoringError(f"reward_func: {error}") from error
        except UserCodeError as error:
            text = f"reward_func: {error}"
            raise ScorerDefect(text, kind=text) from error

    # The workers are separate processes already, and those that run rollouts also compute rewards.
    MCPScorerFactory.register_scorer(SCORER, score, isolated=False)
