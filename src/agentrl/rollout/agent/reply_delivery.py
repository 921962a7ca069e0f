"""Sampled replies in the form that agents receive: as messages, and as text during sampling."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from agentrl.inference.dialects.session import DELTA_KINDS, Delta, DeltaKind, OnDelta
from agentrl.renderers import Reply
from agentrl.renderers.thinking import has_finished_thinking, without_thinking
from agentrl.schema import Message

_SECONDS_BETWEEN = 0.05
_PAUSE_PER_READING = 9
_OPENERS = "<[{"
"""First characters of tool calls and thinking."""
_LONGEST_OPENER = 40


def as_delivered(reply: Reply, *, may_call: bool, stop: tuple[str, ...] = ()) -> Message:
    """Return a reply as the agent receives it, with arguments as objects.

    A call that cannot be parsed is delivered as the text that contains it.
    """
    message: Message = {"role": "assistant"}
    if reply.reasoning.strip():
        message["reasoning_content"] = reply.reasoning
    well_formed = all(call.format_error is None for call in reply.tool_calls)
    if reply.tool_calls and may_call and well_formed:
        message["content"] = cut(reply.content, stop).strip()
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.tool_calls
        ]
        return message
    text = reply.content
    if reply.tool_calls:
        text = without_thinking(reply.text) if reply.reasoning else reply.text
    text = cut(text, stop)
    return {**message, "content": text.strip() if reply.reasoning else text}


def with_call_ids(message: Message, mark: str) -> Message:
    """Return a reply whose calls have ids that no other rollout uses.

    Frameworks that keep the messages of all their conversations in one place tell calls apart by
    id alone, and a turn's own ids are the same in every rollout.
    """
    if "tool_calls" not in message:
        return message
    calls = [{**call, "id": f"{call['id']}_{mark}"} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def stopped_by(text: str, stop: tuple[str, ...]) -> str | None:
    """Return the stop text that a text ends before; None if it holds none."""
    places = [(text.index(end), end) for end in stop if end in text]
    return min(places)[1] if places else None


def cut(text: str, stop: tuple[str, ...]) -> str:
    """Return the text before the first stop text."""
    for end in stop:
        text = text.partition(end)[0]
    return text


def all_content(reply: Reply) -> Reply:
    """Return the continuation of a plain text, without looking for thinking or calls."""
    return replace(reply, content=reply.text, reasoning="", tool_calls=())


class DeltaStream:
    """Streams the text of a growing reply as far as it can no longer change.

    Tool calls and what follows them are not sent: only the whole reply shows whether they are
    calls. The whole reply may still be read differently: a stray `</think>` turns content into
    thinking, and a call ends unclosed thinking. Text that was already sent then stays in the reply.

    Args:
        read: parses ids.
        on_delta: receives the text.
        stop: texts before which the reply ends.
        calls_may_lead: whether a reply that starts with a brace or bracket may be a call.
    """

    def __init__(
        self,
        read: Callable[[np.ndarray], Reply],
        on_delta: OnDelta,
        *,
        stop: tuple[str, ...] = (),
        calls_may_lead: bool = False,
    ) -> None:
        self._read = read
        self._on_delta = on_delta
        self._stop = stop
        self._calls_may_lead = calls_may_lead
        self._sent: dict[DeltaKind, str] = dict.fromkeys(DELTA_KINDS, "")
        self._due = 0.0

    def update(self, ids: np.ndarray) -> None:
        """Send the additions, at most every 50 ms, because all ids are parsed each time.

        A long reply is parsed less often: parsing takes at most a tenth of the event loop's time.

        Args:
            ids: all ids so far, int32 [T].
        """
        now = time.monotonic()
        if now < self._due:
            return
        reply = self._read(ids)
        read = time.monotonic()
        self._due = read + max(_SECONDS_BETWEEN, _PAUSE_PER_READING * (read - now))
        content = reply.content
        if reply.reasoning.strip():
            content = content.lstrip()
            is_over = has_finished_thinking(reply.text)
            thought = reply.reasoning if is_over else self._settled(reply.reasoning)
            self._send("reasoning_content", thought)
        is_open = reply.tool_calls or content[:1].isspace()
        if not is_open and not (self._calls_may_lead and content[:1] in _OPENERS):
            self._send("content", self._settled(content))

    def whole(self, message: Message) -> Message:
        """Return the whole reply, adjusted to start with what was sent."""
        for kind, sent in self._sent.items():
            text = message.get(kind, "")
            if not text.startswith(sent):
                message = {**message, kind: sent + text}
        return message

    def _send(self, kind: DeltaKind, text: str) -> None:
        sent = self._sent[kind]
        if len(text) > len(sent) and text.startswith(sent):
            self._sent[kind] = text
            self._on_delta(Delta(kind, text[len(sent) :]))

    def _settled(self, text: str) -> str:
        """Return the part of a text that nothing after it can change."""
        text = cut(text, self._stop)
        text = text.rstrip("\ufffd")  # an incomplete character
        tail = max(0, len(text) - _LONGEST_OPENER)
        ends = [place for opener in _OPENERS if (place := text.find(opener, tail)) >= 0]
        ends += [
            len(text) - size
            for stop in self._stop
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        ]
        return text[: min(ends, default=len(text))].rstrip()
