"""Token sequences of conversations with one model, for training engines that sample themselves.

An agent framework sends the whole conversation with every call. The repeated part is recognized,
and only the new part is encoded: every call continues the previous call's tokens as sampled.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.errors import APIError
from agentrl.inference.dialects.continuation import ContinuationIndex, conversation_key
from agentrl.plugins.integrations.agent_worker.engine_session import EngineReply
from agentrl.renderers import Renderer
from agentrl.schema import Message


@dataclass
class TokenChain:
    """One growing sequence of the model's inputs and outputs.

    Attributes:
        messages: the conversation, including the model's replies.
        ids: all of its tokens.
        mask: for the tokens after the first prompt, 1 for sampled tokens.
        logprobs: as long as `mask`, 0 for tokens that were not sampled; None if the server provides
            none.
        versions: as long as `mask`, policy versions, -1 for tokens that were not sampled; empty if
            the server provides none.
        as_sampled: `messages` with the model's replies as its chat template renders them; empty if
            the engine does the rendering.
        num_replies: number of replies.
        busy: whether a reply is being sampled.
    """

    messages: list[Message]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    versions: list[int] = field(default_factory=list)
    as_sampled: list[Message] = field(default_factory=list)
    num_replies: int = 0
    busy: bool = False

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(self.mask)

    def extend(
        self, ids: Sequence[int], mask: int, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Add tokens after the first prompt, all of them sampled (mask 1) or given (mask 0)."""
        self.ids.extend(ids)
        self.mask.extend([mask] * len(ids))
        self.logprobs = [*(self.logprobs or ()), *logprobs]
        self.versions.extend(versions)

    def truncate(self, num_dropped: int) -> None:
        """Drop the last tokens."""
        if num_dropped:
            assert self.logprobs is not None
            for values in (self.ids, self.mask, self.logprobs, self.versions):
                del values[len(values) - num_dropped :]


class TokenChains:
    """All sequences of one rollout."""

    def __init__(self) -> None:
        self._chains: list[TokenChain] = []
        self._index = ContinuationIndex[TokenChain]()

    def take(self, messages: Sequence[Message]) -> TokenChain:
        """Return the longest chain that these messages continue, or a new one without tokens.

        The chain is busy, and not returned to other calls, until `answered` or `give_back`.
        """
        for length, chains in self._index.matches(conversation_key(messages)):
            for chain in chains:
                # A chain that has grown since cannot be used: a sequence has no branches.
                if not chain.busy and len(chain.messages) == length:
                    chain.busy = True
                    return chain
        self._chains.append(TokenChain([], busy=True))
        return self._chains[-1]

    def answered(
        self, chain: TokenChain, request_messages: Sequence[Message], reply: Message
    ) -> None:
        """Allow later calls to continue a chain after its reply."""
        self._index.add(conversation_key(request_messages), reply, chain)
        chain.messages = [*request_messages, reply]
        chain.num_replies += 1
        chain.busy = False

    def give_back(self, chain: TokenChain) -> None:
        """End a call that may have failed; an unchanged chain can be continued again."""
        chain.busy = False

    def sampled(self) -> list[TokenChain]:
        """Return the chains with sampled tokens."""
        return [chain for chain in self._chains if chain.num_sampled]

    def longest(self) -> TokenChain | None:
        """Return the chain with the most sampled tokens; None if no token was sampled."""
        return max(self.sampled(), key=lambda chain: chain.num_sampled, default=None)


@dataclass(frozen=True)
class SampledTokens:
    """The output of a server: T tokens."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    """Policy version that sampled each token."""


Generate = Callable[[list[int]], Awaitable[SampledTokens]]
"""Prompt ids to the tokens sampled after them."""


class RecordedRollout:
    """Answers the calls of one rollout through servers that accept and return token ids.

    Attributes:
        chains: the conversations so far.
    """

    def __init__(self, renderer: Renderer, generate: Generate, max_tokens: int) -> None:
        """Start a rollout."""
        self.chains = TokenChains()
        self._renderer = renderer
        self._generate = generate
        self._max_tokens = max_tokens

    async def answer(self, messages: list[Message], tools: list[dict[str, Any]]) -> EngineReply:
        """Return the model's reply to a conversation."""
        chain = self.chains.take(messages)
        try:
            added = messages[len(chain.messages) :]
            shared_len, added_ids = self._prompt(chain, added, tools)
            prompt = [*chain.ids[:shared_len], *added_ids]
            if len(prompt) >= self._max_tokens:
                raise APIError(
                    f"the conversation has {len(prompt)} tokens, more than allowed",
                    code="context_length_exceeded",
                )
            sampled = await self._generate(prompt)
            # The chain changes only after success, so a retried call starts from the same tokens.
            if chain.ids:
                chain.truncate(len(chain.ids) - shared_len)
                chain.extend(added_ids, 0, [0.0] * len(added_ids), [-1] * len(added_ids))
            else:
                chain.ids = [*prompt]
            chain.extend(sampled.ids, 1, sampled.logprobs, sampled.versions)
            parsed = self._renderer.parse(sampled.ids, turn=chain.num_replies, tools=tools)
            content, calls = parsed.text, list[tuple[str, str]]()
            if parsed.tool_calls and all(c.format_error is None for c in parsed.tool_calls):
                content = parsed.content.strip()
                calls = [(call.name, json.dumps(call.arguments)) for call in parsed.tool_calls]
            reply = EngineReply(content, tuple(calls), len(prompt), len(sampled.ids))
            chain.as_sampled += [*added, parsed.message]
            self.chains.answered(chain, messages, reply.message())
            return reply
        finally:
            self.chains.give_back(chain)

    def _prompt(
        self, chain: TokenChain, added: list[Message], tools: list[dict[str, Any]]
    ) -> tuple[int, list[int]]:
        """Return how many of a chain's tokens the prompt shares, and the ids after them.

        A template may replace the token that ended the last reply.
        """
        if not chain.ids:
            return 0, self._renderer.render(added, tools).tolist()
        increment = self._renderer.extend_prompt(
            np.asarray(chain.ids), chain.as_sampled, added, tools
        )
        return increment.shared_len, increment.added_ids.tolist()
