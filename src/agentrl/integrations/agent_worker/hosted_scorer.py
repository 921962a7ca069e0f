"""The user's reward function as a scorer of samplers."""

from agentrl.errors import ScoringError
from agentrl.integrations.agent_worker.worker_pool import AgentFailed, AgentHosts, HostFailed
from agentrl.integrations.dataset_rows import SCORER
from agentrl.rewards import GroundTruth, MCPScorerFactory


def register_reward(hosts: AgentHosts) -> None:
    """Make the reward function of these hosts the scorer `SCORER`, if they have one."""
    if hosts.settings.reward is None:
        return
    is_aworld = hosts.settings.reward_form == "aworld"

    async def score(answer: str, truth: GroundTruth) -> float:
        if is_aworld:
            arguments = {**truth.answer, "solution_str": answer}
        else:
            arguments = {"positional": [answer, truth.model_dump(mode="json")]}
        try:
            return await hosts.reward(arguments)
        except (HostFailed, AgentFailed) as error:
            raise ScoringError(f"reward_func: {error}") from error

    MCPScorerFactory.register_scorer(SCORER, score)
