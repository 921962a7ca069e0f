"""The calls of one rollout so far, and how the next prompt follows from them.

A request that repeats an earlier request and its reply, and adds to it, continues that turn: its
prompt is that turn's ids, prompt and sample, and the ids of what was added. Any other request is
rendered anew and branches off where its ids still agree with those of a turn.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from agentrl.inference.dialects.messages import meaning, tools_meaning, with_own_ids
from agentrl.renderers import Renderer
from agentrl.rollout.conversation import Prompt
from agentrl.schema import DispatchedSamplingTask, Message
from agentrl.schema.image import image_addresses

FORK = "fork"
"""The prompt leaves another turn's before that turn's reply: a parallel call, or a sub-agent's."""
EDITED_CONTEXT = "edited_context"
"""The prompt goes on behind another turn's reply, but with another history."""

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Plan:
    """How a request is going to be prompted."""

    prompt: Prompt
    chain: str
    """Digest of the tools and of what all messages mean."""
    tools: str
    """Digest of the tools."""
    messages: tuple[Message, ...]
    """The whole conversation, the policy's replies as they were sampled."""
    added: tuple[Message, ...]
    """What stands in it beyond the turn that it continues; all of it where it continues none."""
    results: tuple[Message, ...] = ()
    """Tool messages at the beginning of `added` that answer the calls of that turn."""
    text: str | None = None
    """The prompt of a plain completion."""


@dataclass(frozen=True, eq=False)
class Answered:
    """A call that was answered, as the next one may build upon it."""

    plan: Plan
    turn_index: int
    messages: tuple[Message, ...]
    """The request's, and the reply as it was sampled."""
    full_ids: np.ndarray
    """Prompt and sampled ids, int32 [F]."""
    text: str | None
    """Prompt and reply of a plain completion."""
    call_names: Mapping[str, str]
    """Id of each of the reply's tool calls -> name of its tool, in order."""
    sent_ids: tuple[str, ...]
    """The ids that the framework knows these calls by."""


class History:
    """All answered calls of a rollout."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._calls: list[Answered] = []
        self._by_chain: dict[str, list[Answered]] = {}
        self._by_reply: dict[str, list[Answered]] = {}

    def plan(self, messages: Sequence[Message], tools: Tools) -> Plan:
        """Return the prompt for a conversation.

        Args:
            messages: as `read_message` returns them.
            tools: OpenAI-form schemas.

        Raises:
            RenderError: the chat template refuses the conversation.
        """
        tools_key = _digest("", tools_meaning(tools))
        chains = [tools_key]
        for message in messages:
            chains.append(_digest(chains[-1], meaning(message)))
        for length in range(len(messages), 0, -1):
            candidates = self._by_chain.get(chains[length])
            if candidates:
                continued = _best(candidates, messages[length - 1])
                return self._continue(continued, messages, length, tools, (chains[-1], tools_key))
        whole = self._as_sampled(messages, None)
        ids = self._renderer.render(whole, tools)
        prompt = self._branch(ids, tools_key, image_addresses(whole))
        return Plan(prompt, chains[-1], tools_key, whole, whole)

    def plan_text(self, text: str) -> Plan:
        """Return the prompt for a plain completion of `text`.

        Raises:
            RenderError: the tokenizer has no plain form of a part of the text.
        """
        known = [a for a in self._calls if a.text is not None and text.startswith(a.text)]
        if not known:
            return self.plan_ids(self._renderer.encode(text), text)
        continued = max(known, key=lambda answered: len(answered.full_ids))
        # The text does not show the token that ended the reply.
        ended = int(continued.full_ids[-1]) in self._renderer.stop_token_ids
        shared_len = len(continued.full_ids) - ended
        added = text[len(continued.text or "") :]
        ids = np.concatenate([continued.full_ids[:shared_len], self._renderer.encode(added)])
        reason = "stop_token" if ended else None
        prompt = Prompt(ids.astype(np.int32), continued.turn_index, shared_len, reason)
        return _plan_of_text(prompt, text, added)

    def plan_ids(self, ids: np.ndarray, text: str) -> Plan:
        """Return the prompt that these ids are, int32 [P]; `text` is what they say."""
        return _plan_of_text(self._branch(ids, _NO_TOOLS), text, text)

    def remember(
        self,
        plan: Plan,
        turn: DispatchedSamplingTask,
        sampled: Message,
        delivered: Message,
        sent_ids: Sequence[str] = (),
    ) -> None:
        """Remember a reply that the framework may build upon.

        Args:
            plan: what was asked.
            turn: the stored turn.
            sampled: the reply for the chat template.
            delivered: the reply as the framework is given it, its calls under their own ids.
            sent_ids: the ids that the framework knows these calls by.
        """
        calls = delivered.get("tool_calls", ())
        answered = Answered(
            plan=plan,
            turn_index=turn.index,
            messages=(*plan.messages, sampled),
            full_ids=np.concatenate([plan.prompt.ids, turn.output_ids]).astype(np.int32),
            text=None if plan.text is None else plan.text + turn.output_text,
            call_names={call["id"]: call["function"]["name"] for call in calls},
            sent_ids=tuple(sent_ids),
        )
        self._calls.append(answered)
        if plan.text is None:
            said = meaning(delivered)
            self._by_reply.setdefault(said, []).append(answered)
            self._by_chain.setdefault(_digest(plan.chain, said), []).append(answered)

    def _continue(
        self,
        continued: Answered,
        messages: Sequence[Message],
        length: int,
        tools: Tools,
        digests: tuple[str, str],
    ) -> Plan:
        """Return the prompt of `messages`, of which the first `length` are those of `continued`."""
        added = self._as_sampled(messages[length:], (continued, messages[length - 1]))
        bridge = self._renderer.bridge(continued.full_ids, continued.messages, added, tools)
        ids = bridge.prompt_ids(continued.full_ids)
        answers = takewhile(lambda message: message["role"] == "tool", added)
        whole = (*continued.messages, *added)
        prompt = Prompt(ids, continued.turn_index, bridge.shared_len, bridge.reason)
        return Plan(
            prompt.showing(
                image_addresses(whole), continued.plan.prompt.images, self._renderer.image_token_id
            ),
            *digests,
            messages=whole,
            added=added,
            results=tuple(m for m in answers if m["tool_call_id"] in continued.call_names),
        )

    def _branch(self, ids: np.ndarray, tools_key: str, images: tuple[str, ...] = ()) -> Prompt:
        """Return `ids` as a branch of the turn with which they share most."""
        best, most = None, 0
        for answered in self._calls:
            # A turn says which tools were shown by the root that it goes back to.
            if answered.plan.tools == tools_key:
                shared = _num_shared(ids, answered.full_ids)
                if shared > most:
                    best, most = answered, shared
        placeholder = self._renderer.image_token_id
        if best is None:
            return Prompt(ids, None, 0, None).showing(images, (), placeholder)
        prompt = Prompt(ids, best.turn_index, most, None, rewritten=True)
        prompt = prompt.showing(images, best.plan.prompt.images, placeholder)
        if prompt.shared_len == len(best.full_ids):
            return prompt
        is_fork = prompt.shared_len <= len(best.plan.prompt.ids)
        return replace(prompt, branch_reason=FORK if is_fork else EDITED_CONTEXT)

    def _as_sampled(
        self, messages: Sequence[Message], behind: tuple[Answered, Message] | None
    ) -> tuple[Message, ...]:
        """Return messages with the policy's replies as sampled, and tool results under their ids.

        Args:
            messages: a conversation, or the end of one.
            behind: the call that they follow, and its reply as the framework sent it back.
        """
        own_ids: dict[str, str] = {}
        names: dict[str, str] = {}
        result: list[Message] = []

        def follow(answered: Answered, sent: Message) -> None:
            own_ids.update(zip(_call_ids(sent), answered.call_names, strict=True))
            names.update(answered.call_names)

        if behind is not None:
            follow(*behind)
        for message in messages:
            known = self._by_reply.get(meaning(message)) if message["role"] == "assistant" else None
            if known:
                answered = _best(known, message)
                follow(answered, message)
                result.append(answered.messages[-1])
            else:
                result.append(with_own_ids(message, own_ids, names))
        return tuple(result)


def _plan_of_text(prompt: Prompt, text: str, added: str) -> Plan:
    messages = ({"role": "user", "content": added},)
    return Plan(prompt, "", _NO_TOOLS, messages, messages, text=text)


def _best(candidates: Sequence[Answered], sent: Message) -> Answered:
    """Return the one whose calls have the ids that were sent back, or else the latest."""
    ids = _call_ids(sent)
    same = [answered for answered in candidates if list(answered.sent_ids) == ids]
    return (same or candidates)[-1]


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]


def _num_shared(ids: np.ndarray, others: np.ndarray) -> int:
    size = min(len(ids), len(others))
    differs = np.flatnonzero(ids[:size] != others[:size])
    return int(differs[0]) if len(differs) else size


def _digest(before: str, text: str) -> str:
    return hashlib.blake2b(f"{before}\n{text}".encode(), digest_size=16).hexdigest()


_NO_TOOLS = _digest("", tools_meaning(()))
