"""Answer extraction and the registered scorers, as rollouts use them (`rollout.context.Scoring`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config.sections import RolloutSection
from agentrl.errors import ConfigError
from agentrl.renderers.stored_conversations import conversations_of
from agentrl.renderers.thinking import split_reasoning
from agentrl.rewards.agent_config import AgentConfig
from agentrl.rewards.factory import MAX_SECONDS, MCPScorerFactory, load_scorer_module
from agentrl.rewards.judge_gate import share_between
from agentrl.rewards.rollout_view import CallSeen, Rollout
from agentrl.schema import DispatchedSamplingTask, GroundTruth, MCPTask, Record, Score
from agentrl.schema.answer_form import find_answer


class RegisteredScoring:
    """The scorers of `MCPScorerFactory`, with the models that they may call.

    Args:
        agent_config: the judge's and the summarizer's models, if there are any.
        max_seconds: timeout of a scoring function.
    """

    def __init__(
        self, agent_config: AgentConfig | None = None, max_seconds: float = MAX_SECONDS
    ) -> None:
        self.agent_config = agent_config
        self._max_seconds = max_seconds

    @classmethod
    def load(cls, section: RolloutSection) -> "RegisteredScoring":
        """Register the user's scorers and read the models' configuration.

        Raises:
            ConfigError: a file is missing or malformed.
        """
        if section.scorer_module is not None:
            load_scorer_module(section.scorer_module)
        path = section.agent_config_path
        config = None if path is None else AgentConfig.load(path)
        return cls(config, section.scorer_timeout_seconds)

    def check(self, scorer: str) -> None:
        """Raise ConfigError if the scorer does not exist or lacks its configuration."""
        MCPScorerFactory.get_scorer(scorer).check(self.agent_config)

    def extract_answer(self, text: str, schema: str) -> str | None:
        """Return the final answer in a model's text, or None; see `extract_answer`."""
        return extract_answer(text, schema)

    async def score(
        self, task: MCPTask, answer: str | None, rollout: Rollout | None = None
    ) -> Score:
        """Score an answer, or what a rollout did, with the task's scorer.

        Raises:
            ScoringError: the scorer could not decide.
            ConfigError: the scorer does not exist or lacks its configuration.
        """
        scorer = MCPScorerFactory.get_scorer(task.scorer)
        return await scorer.score(
            answer,
            GroundTruth.of(task),
            self.agent_config,
            rollout=rollout,
            max_seconds=self._max_seconds,
        )

    def takes_rollout(self, scorer: str) -> bool:
        """Return whether a scorer is given what was done."""
        return MCPScorerFactory.get_scorer(scorer).takes_rollout

    def sees_group(self, scorer: str) -> bool:
        """Return whether a scorer scores all rollouts of a question together.

        An unknown name may belong to a user's sampler class, which does its own scoring.
        """
        try:
            return MCPScorerFactory.get_scorer(scorer).sees_group
        except ConfigError:
            return False

    def share_limits(self, num_samplers: int) -> None:
        """Divide the judges' requests a minute by the samplers that are at work."""
        share_between(num_samplers)

    async def score_group(self, task: MCPTask, records: Sequence[Record]) -> list[Score]:
        """Score all rollouts of a task with its scorer.

        Raises:
            ScoringError: the scorer could not decide.
            ConfigError: the scorer does not exist or lacks its configuration.
        """
        scorer = MCPScorerFactory.get_scorer(task.scorer)
        return await scorer.score_group(
            records, GroundTruth.of(task), self.agent_config, max_seconds=self._max_seconds
        )


def extract_answer(text: str, schema: str = "answer") -> str | None:
    """Return the final answer in a model's text, or None if it gave none.

    Args:
        text: the model's text; thinking is ignored.
        schema: see `schema.answer_form`.
    """
    _, visible = split_reasoning(text)
    return find_answer(visible, schema)


def rollout_of(
    turns: Sequence[DispatchedSamplingTask],
    *,
    outcome: str,
    columns: Mapping[str, Any],
    reward: float | None = None,
) -> Rollout:
    """Return what a scoring function sees of the turns of a rollout."""
    messages: list[dict[str, Any]] = []
    for conversation, _ in conversations_of(turns):
        messages = [
            {key: value for key, value in message.items() if key != "weight"}
            for message in conversation
        ]
    calls = []
    for turn in turns:
        results = {result.call_id: result for result in turn.tool_results}
        for call in turn.tool_calls:
            result = results.get(call.id)
            calls.append(
                CallSeen(
                    tool=call.name,
                    arguments=call.arguments,
                    result="" if result is None else result.content,
                    is_error=result is None or result.is_error,
                    turn=turn.index,
                    seat="" if turn.seat is None else turn.seat.name,
                )
            )
    seats = dict.fromkeys(turn.seat.name for turn in turns if turn.seat is not None)
    return Rollout(outcome, messages, calls, tuple(seats), columns, reward)
