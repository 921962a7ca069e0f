"""Calls of an agent framework answered token by token, for engines that only take and give ids."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.integrations.agent_worker.answering import ConversationTooLong, Reply
from agentrl.integrations.agent_worker.chain import Chain, Chains
from agentrl.renderers import Renderer
from agentrl.schema import Message


@dataclass(frozen=True)
class Sampled:
    """What a server sampled: T tokens."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    """Policy version that sampled each token."""


Generate = Callable[[list[int]], Awaitable[Sampled]]
"""Prompt ids to what is sampled after them."""


class RecordedRollout:
    """The calls of one rollout: every one continues the tokens of the call that it repeats.

    Attributes:
        chains: the conversations so far.
    """

    def __init__(self, renderer: Renderer, generate: Generate, max_tokens: int) -> None:
        """Begin a rollout.

        Args:
            renderer: chat template and tokenizer of the model.
            generate: asks the engine's servers.
            max_tokens: longest sequence that is begun.
        """
        self.chains = Chains()
        self._renderer = renderer
        self._generate = generate
        self._max_tokens = max_tokens

    async def answer(self, messages: list[Message], tools: list[dict[str, Any]]) -> Reply:
        """Return the model's reply to a conversation.

        Raises:
            ConversationTooLong: there is no room for a reply.
            RenderError: the template cannot render it.
        """
        chain = self.chains.take(messages)
        try:
            self._prompt(chain, messages, tools)
            num_prompt = len(chain.ids)
            if num_prompt >= self._max_tokens:
                raise ConversationTooLong(
                    f"the conversation has {num_prompt} tokens, more than allowed"
                )
            sampled = await self._generate(list(chain.ids))
            _extend(chain, sampled.ids, 1, sampled.logprobs, sampled.versions)
            said = self._renderer.parse(sampled.ids, turn=chain.num_replies, tools=tools)
            chain.num_replies += 1
            content, calls = said.text, list[tuple[str, str]]()
            if said.tool_calls and all(call.format_error is None for call in said.tool_calls):
                content = said.content.strip()
                calls = [(call.name, json.dumps(call.arguments)) for call in said.tool_calls]
            reply = Reply(content, tuple(calls), num_prompt, len(sampled.ids))
            chain.messages = [*messages, reply.message()]
            chain.as_sampled.append(said.message)
            return reply
        finally:
            chain.busy = False

    def _prompt(self, chain: Chain, messages: list[Message], tools: list[dict[str, Any]]) -> None:
        """Put behind a chain's tokens what the conversation adds to them."""
        if not chain.ids:
            chain.ids = self._renderer.render(messages, tools).tolist()
            chain.as_sampled = [*messages]
            return
        added = messages[len(chain.messages) :]
        bridge = self._renderer.bridge(np.asarray(chain.ids), chain.as_sampled, added, tools)
        # A template may put something else in the place of the token that ended the reply.
        dropped = len(chain.ids) - bridge.shared_len
        if dropped:
            assert chain.logprobs is not None
            for values in (chain.ids, chain.mask, chain.logprobs, chain.versions):
                del values[len(values) - dropped :]
        ids = bridge.added_ids.tolist()
        _extend(chain, ids, 0, [0.0] * len(ids), [-1] * len(ids))
        chain.as_sampled = [*chain.as_sampled, *added]


def _extend(
    chain: Chain,
    ids: Sequence[int],
    mask: int,
    logprobs: Sequence[float],
    versions: Sequence[int],
) -> None:
    chain.ids.extend(ids)
    chain.mask.extend([mask] * len(ids))
    chain.logprobs = [*(chain.logprobs or ()), *logprobs]
    chain.versions.extend(versions)
