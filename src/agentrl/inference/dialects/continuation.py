"""Finds the earlier call that a call continues.

A framework that continues a conversation sends back the reply it received, but seldom verbatim: it
assigns its own tool-call ids, formats JSON arguments with other spaces and numbers, drops thinking
and null values, and sends null for empty content. Conversations are therefore compared by `meaning`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

from agentrl.schema import Message

_Call = TypeVar("_Call")


def meaning(message: Message) -> str:
    """Return a text that two messages share if and only if they mean the same."""
    calls = [
        (call["function"]["name"], _by_value(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    content = message.get("content") or ""
    if isinstance(content, str):
        content = content.strip().replace("\r\n", "\n")
    parts = (message["role"], content, calls)
    return json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)


def _by_value(arguments: Any) -> Any:
    """Return arguments without nulls, with numbers as JavaScript reads them: 1.0 is 1, -0.0 is 0."""
    return json.loads(
        json.dumps(arguments, default=str),
        parse_int=_double,
        parse_float=_double,
        object_hook=lambda found: {key: one for key, one in found.items() if one is not None},
    )


def _double(text: str) -> float:
    return float(text) + 0.0  # -0.0 becomes 0.0


def tools_meaning(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a text that the same tools in the same order share."""
    return json.dumps(list(tools), sort_keys=True, default=str)


@dataclass(frozen=True)
class ConversationKey:
    """The key of a conversation in an index: equal for conversations that mean the same."""

    digests: tuple[str, ...]
    """Of every beginning of the conversation, from its scope alone to all of its messages. Each
    covers the one before, so each message is hashed only once.
    """


def conversation_key(messages: Sequence[Message], *, scope: str = "") -> ConversationKey:
    """Return the key of a conversation."""
    texts = map(meaning, messages)
    return ConversationKey(tuple(accumulate(texts, _digest, initial=_digest("", scope))))


class ContinuationIndex(Generic[_Call]):
    """Answered calls by the conversations that they ended: all messages, the reply included."""

    def __init__(self) -> None:
        self._calls: dict[str, list[_Call]] = {}

    def add(self, conversation: ConversationKey, reply: Message, call: _Call) -> None:
        """Add a call."""
        digest = _digest(conversation.digests[-1], meaning(reply))
        self._calls.setdefault(digest, []).append(call)

    def matches(self, conversation: ConversationKey) -> Iterator[tuple[int, Sequence[_Call]]]:
        """Yield the calls that a conversation continues, those with the most messages first."""
        for length in range(len(conversation.digests) - 1, 0, -1):
            if calls := self._calls.get(conversation.digests[length]):
                yield length, calls


def _digest(previous: str, text: str) -> str:
    return hashlib.blake2b(f"{previous}\n{text}".encode(), digest_size=16).hexdigest()
