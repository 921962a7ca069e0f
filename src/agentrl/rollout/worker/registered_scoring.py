"""The registered scorers, as rollouts see them."""

from agentrl.config.sections import RolloutSection
from agentrl.rewards import (
    AgentConfig,
    GroundTruth,
    MCPScorerFactory,
    extract_answer,
    load_scorer_module,
)
from agentrl.schema import MCPTask, Score


class RegisteredScoring:
    """Answer extraction and the scorers of `MCPScorerFactory`."""

    def __init__(self, agent_config: AgentConfig | None = None) -> None:
        self._agent_config = agent_config

    @classmethod
    def load(cls, section: RolloutSection) -> "RegisteredScoring":
        """Register the user's scorers and read the judge's configuration.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        if section.scorer_module is not None:
            load_scorer_module(section.scorer_module)
        path = section.agent_config_path
        return cls(None if path is None else AgentConfig.load(path))

    @property
    def agent_config(self) -> AgentConfig | None:
        """The language models that AgentRL asks for help."""
        return self._agent_config

    def check(self, scorer: str) -> None:
        """Raise ConfigError if there is no such scorer, or it lacks its configuration."""
        MCPScorerFactory.get_scorer(scorer).check(self._agent_config)

    def extract_answer(self, text: str, schema: str) -> str | None:
        """Return the final answer that the text gives, or None."""
        return extract_answer(text, schema)

    async def score(self, task: MCPTask, answer: str) -> Score:
        """Judge an answer with the task's scorer.

        Raises:
            ScoringError: no verdict could be had.
            ConfigError: there is no such scorer, or it lacks its configuration.
        """
        scorer = MCPScorerFactory.get_scorer(task.scorer)
        return await scorer.score(answer, GroundTruth.of(task), self._agent_config)
