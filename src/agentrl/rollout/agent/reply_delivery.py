"""Sampled replies as agents are given them: as messages, and as text while they are sampled."""

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
"""What tool calls and thinking begin with."""
_LONGEST_OPENER = 40


def as_delivered(reply: Reply, *, may_call: bool, stop: tuple[str, ...] = ()) -> Message:
    """Return a reply as the agent is given it, arguments as objects.

    A call that cannot be parsed is delivered as the text in which it stands.
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
    """Return what stands before the first stop text."""
    for end in stop:
        text = text.partition(end)[0]
    return text


def all_content(reply: Reply) -> Reply:
    """Return the continuation of a plain text, in which nothing is thinking or a call."""
    return replace(reply, content=reply.text, reasoning="", tool_calls=())


class DeltaStream:
    """Sends the text of a growing reply as far as it is certain to stay as it is.

    Tool calls and what follows them are not sent: only the whole reply says whether they are any.
    The whole reply may turn out differently after all: a stray `</think>` makes thinking of what
    was content, a call ends thinking that never ended. Then text that was sent stays in it.

    Args:
        read: parses ids.
        on_delta: receives the text.
        stop: texts before which the reply ends.
        calls_may_lead: a reply that begins with a brace or bracket may be a call.
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
        """Send what was added; at most every 50 ms, as all ids are parsed each time.

        A long reply is parsed less often: that takes a tenth of the event loop's time at most.

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
        """Return the whole reply so that it begins with what was sent."""
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
        """Return the beginning of a text that stays as it is whatever follows."""
        text = cut(text, self._stop)
        text = text.rstrip("\ufffd")  # a character of which not all bytes are there
        tail = max(0, len(text) - _LONGEST_OPENER)
        ends = [place for opener in _OPENERS if (place := text.find(opener, tail)) >= 0]
        ends += [
            len(text) - size
            for stop in self._stop
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        ]
        return text[: min(ends, default=len(text))].rstrip()
