"""The calls of one rollout so far, and how the next prompt follows from them.

A request that repeats an earlier request and its reply, and adds to it, continues that turn: its
prompt consists of that turn's ids, as sampled, and the ids of the additions. Any other request is
rendered from scratch and branches from the turn with which it shares the longest token prefix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from agentrl.errors import RenderError
from agentrl.inference.dialects.continuation import (
    ContinuationIndex,
    ConversationKey,
    conversation_key,
    meaning,
    tools_meaning,
)
from agentrl.renderers import Renderer
from agentrl.renderers.conversation import AnsweredTurn, Prompt
from agentrl.schema import DispatchedSamplingTask, Message, num_shared_ids
from agentrl.schema.image import image_addresses

FORK = "fork"
"""The prompt shares less than the whole prompt of another turn: a parallel call, or a sub-agent's.
"""
EDITED_CONTEXT = "edited_context"
"""The prompt shares a part of another turn's reply, but its history was edited."""

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Plan:
    """The prompt of a request and how it was derived."""

    prompt: Prompt
    tools: str
    """The tools in canonical form."""
    conversation: ConversationKey
    """The conversation as the framework sent it."""
    messages: tuple[Message, ...]
    """The conversation with the policy's replies as they were sampled."""
    added: tuple[Message, ...]
    """The messages that the continued turn does not have; all of them if no turn is continued."""
    results: tuple[Message, ...] = ()
    """Tool messages at the beginning of `added` that answer the calls of that turn."""
    text: str | None = None
    """The prompt of a plain completion."""


@dataclass(frozen=True, eq=False)
class _AnsweredCall:
    """An answered call that a later call may continue."""

    plan: Plan
    turn: AnsweredTurn
    text: str | None
    """Prompt and reply of a plain completion."""
    call_names: Mapping[str, str]
    """Id of each of the reply's tool calls -> name of its tool, in order."""
    sent_ids: tuple[str, ...]
    """The ids by which the framework knows these calls."""


class CallHistory:
    """All answered calls of a rollout."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._calls: list[_AnsweredCall] = []
        # The tools form the scope: they precede all messages in the prompt.
        self._by_conversation = ContinuationIndex[_AnsweredCall]()
        self._by_reply: dict[str, list[_AnsweredCall]] = {}

    def plan(self, messages: Sequence[Message], tools: Tools) -> Plan:
        """Return the prompt for a conversation."""
        if tools and self._renderer.calls_problem is not None:
            raise RenderError(self._renderer.calls_problem)
        scope = tools_meaning(tools)
        conversation = conversation_key(messages, scope=scope)
        for length, calls in self._by_conversation.matches(conversation):
            continued = _best(calls, messages[length - 1])
            return self._continue(continued, messages, length, tools, conversation)
        sampled = self._as_sampled(messages, None)
        ids = self._renderer.render(sampled, tools)
        prompt = self._branch(ids, scope, image_addresses(sampled))
        return Plan(prompt, scope, conversation, sampled, sampled)

    def plan_text(self, text: str) -> Plan:
        """Return the prompt for a plain completion of `text`."""
        known = [c for c in self._calls if c.text is not None and text.startswith(c.text)]
        if not known:
            return self.plan_ids(self._renderer.encode(text), text)
        continued = max(known, key=lambda call: len(call.turn.full_ids))
        full_ids = continued.turn.full_ids
        # The text does not show the token that ended the reply.
        ended = int(full_ids[-1]) in self._renderer.stop_token_ids
        shared_len = len(full_ids) - ended
        added = text[len(continued.text or "") :]
        ids = np.concatenate([full_ids[:shared_len], self._renderer.encode(added)])
        reason = "stop_token" if ended else None
        prompt = Prompt(ids.astype(np.int32), continued.turn.index, shared_len, reason)
        return _plan_of_text(prompt, text, added)

    def plan_ids(self, ids: np.ndarray, text: str) -> Plan:
        """Return the prompt that consists of these ids, int32 [P]; `text` is their decoded form."""
        return _plan_of_text(self._branch(ids, _NO_TOOLS), text, text)

    def remember(
        self,
        plan: Plan,
        turn: DispatchedSamplingTask,
        sampled: Message,
        delivered: Message,
        sent_ids: Sequence[str] = (),
    ) -> None:
        """Remember an answered call that later ones may continue."""
        calls = delivered.get("tool_calls", ())
        full_ids = np.concatenate([plan.prompt.ids, turn.output_ids]).astype(np.int32)
        answered = _AnsweredCall(
            plan=plan,
            turn=AnsweredTurn(turn.index, (*plan.messages, sampled), full_ids, plan.prompt.images),
            text=None if plan.text is None else plan.text + turn.output_text,
            call_names={call["id"]: call["function"]["name"] for call in calls},
            sent_ids=tuple(sent_ids),
        )
        self._calls.append(answered)
        if plan.text is None:
            self._by_reply.setdefault(meaning(delivered), []).append(answered)
            self._by_conversation.add(plan.conversation, delivered, answered)

    def _continue(
        self,
        continued: _AnsweredCall,
        messages: Sequence[Message],
        length: int,
        tools: Tools,
        conversation: ConversationKey,
    ) -> Plan:
        """Return the prompt of `messages`, of which the first `length` are those of `continued`."""
        added = self._as_sampled(messages[length:], (continued, messages[length - 1]))
        results = takewhile(lambda message: message["role"] == "tool", added)
        return Plan(
            continued.turn.next_prompt(self._renderer, added, tools),
            continued.plan.tools,
            conversation,
            messages=(*continued.turn.messages, *added),
            added=added,
            results=tuple(m for m in results if m["tool_call_id"] in continued.call_names),
        )

    def _branch(self, ids: np.ndarray, tools: str, images: tuple[str, ...] = ()) -> Prompt:
        """Return `ids` as a branch of the turn that shares the longest prefix with them."""
        best, num_shared = None, 0
        for answered in self._calls:
            # All turns of a tree have the tools of its root.
            if answered.plan.tools == tools:
                shared = num_shared_ids(ids, answered.turn.full_ids)
                if shared > num_shared:
                    best, num_shared = answered, shared
        placeholder = self._renderer.image_token_id
        if best is None:
            return Prompt(ids, None, 0, None).showing(images, (), placeholder)
        prompt = Prompt(ids, best.turn.index, num_shared, None, rewritten=True)
        prompt = prompt.showing(images, best.plan.prompt.images, placeholder)
        if prompt.shared_len == len(best.turn.full_ids):
            return prompt
        is_fork = prompt.shared_len <= len(best.plan.prompt.ids)
        return replace(prompt, branch_reason=FORK if is_fork else EDITED_CONTEXT)

    def _as_sampled(
        self, messages: Sequence[Message], preceding: tuple[_AnsweredCall, Message] | None
    ) -> tuple[Message, ...]:
        """Return messages with the policy's replies as sampled, and tool results under their ids."""
        own_ids: dict[str, str] = {}
        names: dict[str, str] = {}
        result: list[Message] = []

        def map_ids(answered: _AnsweredCall, sent: Message) -> None:
            own_ids.update(zip(_call_ids(sent), answered.call_names, strict=True))
            names.update(answered.call_names)

        if preceding is not None:
            map_ids(*preceding)
        for message in messages:
            known = self._by_reply.get(meaning(message)) if message["role"] == "assistant" else None
            if known:
                answered = _best(known, message)
                map_ids(answered, message)
                result.append(answered.turn.messages[-1])
            else:
                result.append(_with_own_ids(message, own_ids, names))
        return tuple(result)


def _plan_of_text(prompt: Prompt, text: str, added: str) -> Plan:
    messages = ({"role": "user", "content": added},)
    return Plan(prompt, _NO_TOOLS, conversation_key(()), messages, messages, text=text)


def _best(candidates: Sequence[_AnsweredCall], sent: Message) -> _AnsweredCall:
    """Return the call whose tool-call ids were sent back, or else the latest."""
    ids = _call_ids(sent)
    same = [answered for answered in candidates if list(answered.sent_ids) == ids]
    return (same or candidates)[-1]


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]


def _with_own_ids(
    message: Message, own_ids: Mapping[str, str], names: Mapping[str, str]
) -> Message:
    """Return a tool message under the id that the policy's call has here, with its tool's name."""
    if message["role"] != "tool":
        return message
    given = message["tool_call_id"]
    own = own_ids.get(given, given)
    name = message.get("name") or names.get(own)
    return {**message, "tool_call_id": own, **({} if name is None else {"name": name})}


_NO_TOOLS = tools_meaning(())
