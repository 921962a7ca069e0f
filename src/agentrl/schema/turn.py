"""`DispatchedSamplingTask`: one model call of a Record, stored as what it added to its parent.

The prompt of a turn is not stored. It is `full(parent)[:shared_len] + added_ids`, where
`full(turn) = prompt(turn) + output_ids(turn)`; `rebuild_prompts` assembles it. Storage
therefore grows with the number of tokens, not with turns times tokens.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import numpy as np
from pydantic import AliasChoices, Field

from agentrl.schema.base import Logprobs, Message, TokenIds, Value, utc_now
from agentrl.schema.grammar import Grammar

FinishReason = Literal["stop", "length", "abort"]
CONTINUING = (None, "drift", "stop_token")
"""Branch reasons of turns that add to their parent's messages; others start with all messages."""
NO_VERSION = -1
"""Stands for the policy version of a token that no span covers."""


class VersionSpan(Value):
    """Output tokens `[start, end)` of one turn were sampled by policy `version`."""

    version: int
    start: int
    end: int


class SamplingParams(Value):
    """How tokens are sampled. Every value is sent, so that no server default applies."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the generation; their sampled tokens stay part of the output."""
    seed: int | None = None
    grammar: Grammar | None = None
    """Constraint on the reply. Behavior logprobs are then normalized over the tokens that the grammar
    allowed, so that the unconstrained policy gives each of them less: with the same weights, the
    importance ratio of a token is the share of the policy's probability that was allowed there."""

    @property
    def has_penalties(self) -> bool:
        """Whether behavior logprobs depend on earlier tokens through penalties, unlike the policy's."""
        neutral = (0.0, 0.0, 1.0)
        return neutral != (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)


class ToolCall(Value):
    """A call that the model made, as parsed from its output."""

    id: str
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    format_error: str | None = None
    """Why the call could not be parsed; `name` and `arguments` then hold what could be recovered."""


class ToolResult(Value):
    """A tool's answer: an observation for the model."""

    call_id: str
    name: str
    content: str
    is_error: bool = False
    """The tool itself reported an error. A failure of the infrastructure is not a ToolResult."""
    seconds: float = 0.0
    images: tuple[str, ...] = ()
    """Images that the model is shown with `content`: addresses of stored images, or `data:` URLs before
    they are stored."""


class Seat(Value):
    """One agent's place in a rollout of several agents, as far as one call is concerned."""

    name: str
    """The same in all rollouts of a task: a seat is compared with the same seat of its group."""
    # Stored as `run` by earlier releases.
    stint: int = Field(default=0, validation_alias=AliasChoices("stint", "run"))
    """Which stint of the seat made the call; stints are numbered by their first calls, from 0."""
    reward: float | None = None
    """Final reward of the stint (`Score.seats_keep_rewards`); None: that of the rollout."""
    trained: bool = True
    """False: the stint's turns are not trained on, such as those of a simulated user."""


class DispatchedSamplingTask(Value):
    """One model call: context added, tokens sampled, and the tool results that followed."""

    id: str
    """`{record_id}/{fence}/{index}`: a holder that lost its lease can never overwrite a turn."""
    record_id: str
    task_id: str
    attempt: int
    index: int
    """Position among the attempt's turns, from 0."""
    parent: int | None = None
    """`index` of the turn whose tokens this prompt starts with; None for a fresh context."""
    shared_len: int = 0
    """Number of leading tokens of `full(parent)` that the prompt repeats."""
    added_ids: TokenIds
    """Prompt ids after the shared part, int32 [A]."""
    shared_images: int = 0
    """Number of leading images of the parent's prompt that this prompt repeats."""
    added_images: tuple[str, ...] = ()
    """Addresses of the images whose placeholders stand in `added_ids`, in order. Every image is one
    placeholder there; the server's expansion of it is not stored."""
    image_placeholder: int | None = None
    """Token id of these placeholders; None without images."""
    image_processor: dict[str, Any] = Field(default_factory=dict)
    """Settings of the model's image processor for them."""
    prompt_positions: int = 0
    """Positions that the prompt took at the server, every image at its full length; 0: unknown."""
    output_ids: TokenIds
    """Sampled ids, the end-of-turn token included, int32 [T]."""
    output_logprobs: Logprobs
    """Behavior logprobs (after temperature), float32 [T]."""
    teacher_logprobs: dict[str, Logprobs] = Field(default_factory=dict)
    """Logprobs that teachers give the sampled tokens at temperature 1, by the teacher's name, float32
    [T] each. Written once, after the record has ended."""
    version_spans: tuple[VersionSpan, ...]
    routed_experts: bytes = b""
    """With `router_replay`: the experts that the server's routers chose, token by token and layer
    by layer (see `schema.routed_experts`)."""
    routed_bytes: Literal[1, 2] = 1
    """Bytes of one expert's number: 2 where there are more than 256 experts."""
    added_messages: tuple[Message, ...] = ()
    """Messages added to the context since the parent, except its tool results; after a rewrite of the
    context (`branch_reason`), all messages that remain."""
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas, in OpenAI format, of the tools shown to the model; only on root turns."""
    output_text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    finish_reason: FinishReason
    branch_reason: str | None = None
    """Why the prompt does not extend its parent in full (`drift`, `discard_all_tools`, ...)."""
    trainable: bool = True
    """False for calls to a model that is not being trained; they have no token ids."""
    model: str = ""
    """Name of the model if it is not the policy."""
    seat: Seat | None = None
    """The seat that made the call, if the rollout has several agents; None if it has one."""
    reward: float | None = None
    """Reward of the turn from the agent or environment, in addition to the rollout's reward."""
    advantage: float | None = None
    """Per-turn override from the rollout (0 for a format error), combined by the trainer."""
    snapshot: str = ""
    """Address of the state in which the tools or the environment were before the turn; empty if none
    was stored."""
    sampling_params: SamplingParams
    server: str = ""
    cached_tokens: int = 0
    num_retractions: int = 0
    started_at: datetime = Field(default_factory=utc_now)
    finished_at: datetime = Field(default_factory=utc_now)


def token_versions(turn: DispatchedSamplingTask) -> np.ndarray:
    """Return the policy version of every output token, `NO_VERSION` where none is known, int32 [T]."""
    versions = np.full(len(turn.output_ids), NO_VERSION, dtype=np.int32)
    for span in turn.version_spans:
        versions[span.start : span.end] = span.version
    return versions


def num_shared_ids(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many leading tokens two sequences of ids [N], [M] have in common."""
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if len(differing) else size


def rebuild_images(turns: Sequence[DispatchedSamplingTask]) -> list[tuple[str, ...]]:
    """Return the addresses of the images in every turn's prompt, in order.

    Args:
        turns: all turns of the attempt, in order of `index` from 0.
    """
    images: list[tuple[str, ...]] = []
    for turn in turns:
        shared = () if turn.parent is None else images[turn.parent][: turn.shared_images]
        images.append((*shared, *turn.added_images))
    return images


def rebuild_prompts(turns: Sequence[DispatchedSamplingTask]) -> list[np.ndarray]:
    """Return the prompt ids of every turn of one attempt, int32 [P_i], as sent to the engine.

    Args, Raises: see `rebuild_full_ids`.
    """
    full = rebuild_full_ids(turns)
    return [ids[: len(ids) - len(turn.output_ids)] for ids, turn in zip(full, turns, strict=True)]


def rebuild_full_ids(turns: Sequence[DispatchedSamplingTask]) -> list[np.ndarray]:
    """Return the prompt with the output of every turn of one attempt, int32 [P_i + T_i].

    Turns that extend each other in full are views of one array, so that memory grows with the
    tokens of an attempt rather than with tokens times turns.

    Args:
        turns: all turns of the attempt, in order of `index` from 0.

    Raises:
        ValueError: a turn is missing, names a parent that does not precede it, or shares more
            tokens than the parent has.
    """
    lengths = _full_lengths(turns)
    chains: list[list[DispatchedSamplingTask]] = []
    by_last_turn: dict[int, list[DispatchedSamplingTask]] = {}
    for turn in turns:
        parent = turn.parent
        if parent in by_last_turn and turn.shared_len == lengths[parent]:
            chain = by_last_turn.pop(parent)
        else:
            chain = []
            chains.append(chain)
        chain.append(turn)
        by_last_turn[turn.index] = chain
    full: dict[int, np.ndarray] = {}
    # A chain's parent belongs to a chain that began before it.
    for chain in chains:
        parent, shared_len = chain[0].parent, chain[0].shared_len
        parts = [] if parent is None else [full[parent][:shared_len]]
        parts += [ids for turn in chain for ids in (turn.added_ids, turn.output_ids)]
        ids_of_chain = np.concatenate(parts)
        full |= {turn.index: ids_of_chain[: lengths[turn.index]] for turn in chain}
    return [full[turn.index] for turn in turns]


def _full_lengths(turns: Sequence[DispatchedSamplingTask]) -> list[int]:
    """Return the length of prompt and output of every turn."""
    lengths: list[int] = []
    for position, turn in enumerate(turns):
        if turn.index != position:
            raise ValueError(f"turn {turn.id}: expected index {position}, found {turn.index}")
        available = 0
        if turn.parent is not None:
            if not 0 <= turn.parent < position:
                raise ValueError(f"turn {turn.id}: its parent {turn.parent} does not precede it")
            available = lengths[turn.parent]
        if turn.shared_len > available:
            raise ValueError(
                f"turn {turn.id} shares {turn.shared_len} tokens of a parent that has {available}"
            )
        lengths.append(turn.shared_len + len(turn.added_ids) + len(turn.output_ids))
    return lengths
