"""`TokenSequence`: one generation from request to end. Plain state; the scheduler advances it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from agentrl.data.shown_images import PlacedImage, rotary_positions
from agentrl.plugins.engine.generation.grammars import GrammarConstraint
from agentrl.plugins.engine.weights.lora_adapters import Adapter

LOWEST_PRIORITY = -(2**63)
"""Of a request that names none, as with SGLang."""
MIN_TEMPERATURE = 1e-6
"""Below it, sampling is greedy and logprobs are those of the raw logits."""


@dataclass(frozen=True)
class DrawParams:
    """How the tokens of one sequence are drawn and when it ends."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the sequence, end-of-text ids included."""
    stop_strings: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Seed of this sequence; noise depends only on it and the position, not on other sequences."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def is_truncated(self) -> bool:
        """Whether unlikely tokens are cut off before drawing."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def is_edited(self) -> bool:
        """Whether the logits are changed before anything else."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.min_new_tokens > 0
            or bool(self.logit_bias)
        )


@dataclass(frozen=True)
class FinishReason:
    """Why a sequence ended."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    status: int | None = None
    """HTTP status of a refusal; None for an ordinary end."""


@dataclass(eq=False, slots=True)
class TokenSequence:
    """One generation. `tokens[:length]` is the prompt followed by the output."""

    rid: str
    tokens: np.ndarray
    """int32 [prompt + room for the output]."""
    num_prompt: int
    params: DrawParams
    namespace: str = ""
    """Prefixes are only shared within one namespace."""
    adapter: Adapter | None = None
    """The adapter that it is sampled from; never changes."""
    stream: bool = False
    constraint: GrammarConstraint | None = None
    """Position of the output in the grammar that it must follow."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the prompt."""
    priority: int = LOWEST_PRIORITY
    """Of the sequences that wait, the one with the highest is computed first."""
    prompt_logprobs_from: int = -1
    """First prompt position whose logprob is requested; -1: none."""
    length: int = 0
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    """Logprobs of the prompt tokens after `prompt_logprobs_from`."""
    versions: list[tuple[str, int]] = field(default_factory=list)
    """Weight label and index of the first output token sampled under it."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in the sequence's cache row."""
    first_sampled: int | None = None
    """Position of the first sampled token if images have rows and columns; set on first use."""
    epoch: int = -1
    """Weights under which they were computed; -1 for none."""
    num_cached: int | None = None
    """Prompt tokens that were not computed because their prefix was cached."""
    routed_experts: np.ndarray | None = None
    """int16 [prompt + room for the output, W], experts that each computed token went to, layer by
    layer; None if the model has no experts.
    """
    num_retractions: int = 0
    is_suspect: bool = False
    """It was part of a step that failed; it is computed alone until a step succeeds."""
    finish: FinishReason | None = None

    @classmethod
    def start(
        cls,
        rid: str,
        prompt: np.ndarray,
        params: DrawParams,
        *,
        namespace: str = "",
        adapter: Adapter | None = None,
        stream: bool = False,
        constraint: GrammarConstraint | None = None,
        prompt_logprobs_from: int = -1,
    ) -> "TokenSequence":
        """Return a sequence that has not been scheduled yet."""
        tokens = np.empty(len(prompt) + params.max_new_tokens, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        return cls(
            rid=rid,
            tokens=tokens,
            num_prompt=len(prompt),
            params=params,
            namespace=namespace,
            adapter=adapter,
            stream=stream,
            constraint=constraint,
            prompt_logprobs_from=prompt_logprobs_from,
            length=len(prompt),
        )

    def showing(self, images: tuple[PlacedImage, ...]) -> "TokenSequence":
        """Return the sequence with these images; prefixes are shared only with the same images."""
        self.images = images
        self.namespace = "\0".join([self.namespace, *(placed.image.key for placed in images)])
        return self

    @property
    def is_prefilled(self) -> bool:
        """Whether all tokens but the last sampled one are in the cache."""
        return bool(self.output_ids) and self.num_computed == self.length - 1

    def beside_images(self, end: int) -> int:
        """Return where a chunk of the prompt that should end here ends, but never within an image."""
        for placed in self.images:
            if placed.start < end < placed.end:
                return placed.start if placed.start > self.num_computed else placed.end
        return end

    def positions(self, start: int, end: int) -> np.ndarray:
        """Return the positions of some tokens, int64 [1 or 3, 1, end - start]."""
        if not self.images or self.images[0].image.grid is None:
            return np.arange(start, end)[None]
        if start >= self.num_prompt:  # sampled text continues from the end of the prompt
            if self.first_sampled is None:
                prompt_positions = rotary_positions(self.num_prompt, self.images)
                self.first_sampled = int(prompt_positions[0, -1]) + 1
            first = self.first_sampled - self.num_prompt
            return np.broadcast_to(np.arange(start, end) + first, (3, 1, end - start))
        return rotary_positions(end, self.images)[:, None, start:]

    def append(self, token: int, logprob: float, label: str) -> None:
        """Append a sampled token."""
        if not self.versions or self.versions[-1][0] != label:
            self.versions.append((label, len(self.output_ids)))
        self.tokens[self.length] = token
        self.length += 1
        self.output_ids.append(token)
        self.output_logprobs.append(logprob)
        if self.constraint is not None:
            self.constraint.take(token)

    def forget_cache(self) -> None:
        """Record that the sequence no longer has a cache row."""
        self.num_computed = 0
        self.epoch = -1
