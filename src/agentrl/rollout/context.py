"""`RolloutContext`: the clients and settings of a process, passed to every `AsyncSampler`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Protocol

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.inference import ServerPool
from agentrl.renderers.renderer import Renderer
from agentrl.rewards.rollout_view import Rollout
from agentrl.rollout.evaluated_route import EvaluatedRoute
from agentrl.rollout.image_library import ImageLibrary
from agentrl.schema import Control, MCPTask, Record, SamplingParams, Score, Split
from agentrl.store import TrajectoryStore
from agentrl.tools import McpToolBox
from agentrl.tools.servers.served_question import ServedQuestion

_IMAGES = ("image", "image_url", "images")


class Scoring(Protocol):
    """Answer extraction and scorers, as rollouts use them."""

    def check(self, scorer: str) -> None:
        """Raise ConfigError unless this scorer can score answers."""
        ...

    def extract_answer(self, text: str, schema: str) -> str | None:
        """Return the final answer in the text, or None."""
        ...

    async def score(
        self, task: MCPTask, answer: str | None, rollout: Rollout | None = None
    ) -> Score:
        """Score an answer, or what a rollout did.

        Raises:
            ScoringError: the scorer could not decide; the score stays missing and scoring is retried.
        """
        ...

    def takes_rollout(self, scorer: str) -> bool:
        """Return whether a scorer is given what was done, and may ask the tools."""
        ...

    def sees_group(self, scorer: str) -> bool:
        """Return whether a scorer scores all Records of a question together."""
        ...

    def share_limits(self, num_samplers: int) -> None:
        """Divide what all samplers together may ask of judges by their number."""
        ...

    async def score_group(self, task: MCPTask, records: Sequence[Record]) -> list[Score]:
        """Score all finished Records of a task, in order.

        Raises:
            ScoringError: see `score`.
        """
        ...


@dataclass
class LiveControl:
    """The run's controls as the worker last read them."""

    current: Control = field(default_factory=Control)


class Summarizer(Protocol):
    """A language model that summarizes long texts for the policy."""

    async def summarize_result(
        self, tool_name: str, arguments: Mapping[str, Any], content: str
    ) -> str | None:
        """Return a summary of a tool's result, or None to keep the result."""
        ...

    async def summarize_history(self, question: str, transcript: str) -> str:
        """Return a summary of the policy's work so far."""
        ...


@dataclass(frozen=True)
class RolloutContext:
    """Clients and settings that all rollouts of a process share.

    Attributes:
        store: the trajectory store.
        servers: the inference servers.
        renderer: chat template, tokenizer and tool-call parser of the policy.
        toolbox: the tools; connected once, safe for concurrent use.
        scoring: answer extraction and scorers.
        rollout: limits of a rollout.
        sampling: how tokens are drawn.
        seed: seed of the run, from which every request's seed is derived.
        context_length: longest sequence that the servers accept, in tokens, if known.
        has_trees: groups of the run branch.
        live: controls that may change during the run.
        router_replay: store which experts of the model every token was routed to.
        resumable: the tools keep no state, so that another sampler may resume a dead one's rollout.
        summarizer: shortens long texts; None if none is configured.
        evaluated_route: the model that answers in the place of the policy, in an evaluation.
        question_folders: folders of the question files, by split; fixtures lie below them.
    """

    store: TrajectoryStore
    servers: ServerPool
    renderer: Renderer
    toolbox: McpToolBox
    scoring: Scoring
    rollout: RolloutSection
    sampling: SamplingSection
    seed: int = 0
    context_length: int | None = None
    router_replay: bool = False
    resumable: bool = False
    has_trees: bool = False
    live: LiveControl = field(default_factory=LiveControl)
    summarizer: Summarizer | None = None
    evaluated_route: EvaluatedRoute | None = None
    question_folders: Mapping[str, Path] = field(default_factory=dict)

    @property
    def max_prompt_len(self) -> int:
        """Longest allowed prompt in tokens: the smaller limit of the run and the servers."""
        longest = self.sampling.max_prompt_tokens
        return longest if self.context_length is None else min(longest, self.context_length - 1)

    def may_fit(self, *values: object) -> bool:
        """Return whether the texts in messages and tools may be short enough for a prompt.

        Checked before tokenizing, which takes about two hundred bytes of memory per character.
        """
        room = self.max_prompt_len * self.renderer.longest_token
        rest: list[object] = [*values]
        while rest and room >= 0:
            value = rest.pop()
            if isinstance(value, str):
                room -= len(value)
            elif isinstance(value, Mapping):
                rest.extend(item for name, item in value.items() if name not in _IMAGES)
            elif isinstance(value, Sequence):
                rest.extend(value)
        return room >= 0

    @cached_property
    def images(self) -> ImageLibrary:
        """The images shown in rollouts."""
        rollout = self.rollout
        max_bytes = int(rollout.max_image_megabytes * 2**20)
        return ImageLibrary(self.store, max_bytes, tuple(map(ip_network, rollout.image_networks)))

    def served_question(self, task: MCPTask, record_id: str) -> ServedQuestion:
        """Return what the tool servers of a rollout are told of its question."""
        return ServedQuestion(
            id=task.dataset_id,
            rollout=record_id,
            columns=task.columns,
            folder=self.question_folders.get(task.split),
        )

    def check_scorer(self, task: MCPTask) -> None:
        """Refuse a task that could be sampled here but not scored.

        Raises:
            ConfigError: see `Scoring.check`.
        """
        if self.rollout.scoring == "own":
            self.scoring.check(self.scorer_of(task))

    def judges_rollouts(self, task: MCPTask) -> bool:
        """Return whether the task's scorer is given what was done, and may ask the tools."""
        return self.rollout.scoring != "elsewhere" and self.scoring.takes_rollout(
            self.scorer_of(task)
        )

    async def score(
        self, task: MCPTask, answer: str | None, *, no_answer: str, rollout: Rollout | None = None
    ) -> Score:
        """Score an answer with the task's scorer; a rollout without an answer scores 0.

        In training the run may name another scorer for all tasks (`Control.scorer`).

        Args:
            task: the question.
            answer: the rollout's final answer.
            no_answer: the reason stored with the 0 of a rollout without one.
            rollout: what was done, for scorers that take it; they decide about those without an
                answer, too.

        Raises:
            ScoringError: the scorer could not decide; the score stays missing and scoring is retried.
        """
        task = task.model_copy(update={"scorer": self.scorer_of(task)})
        if answer is None and rollout is None:
            return Score(scorer=task.scorer, value=0.0, detail=no_answer)
        return await self.scoring.score(task, answer, rollout)

    def scorer_of(self, task: MCPTask) -> str:
        """Return the name of the scorer that scores a task's answers now."""
        other = self.live.current.scorer
        return task.scorer if other is None or task.split != "train" else other

    def sampling_params(self, split: Split, **overrides: Any) -> SamplingParams:
        """Return how tokens of a rollout in this split are drawn."""
        section = self.sampling
        temperature = section.temperature if split == "train" else section.eval_temperature
        values: dict[str, Any] = {
            "temperature": temperature,
            "top_p": section.top_p,
            "top_k": section.top_k,
            "min_p": section.min_p,
            "presence_penalty": section.presence_penalty,
            "frequency_penalty": section.frequency_penalty,
            "repetition_penalty": section.repetition_penalty,
            "max_new_tokens": section.max_new_tokens,
            "stop_token_ids": tuple(self.renderer.stop_token_ids),
        }
        live = self.live.current.sampling() if split == "train" else {}
        return SamplingParams(**(values | live | overrides))
