"""Sampled replies in the form that agents receive: as messages, and as text during sampling."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from agentrl.inference.dialects.session import DELTA_KINDS, Delta, DeltaKind, OnDelta
from agentrl.renderers import Reply
from agentrl.renderers.thinking import has_finished_thinking, without_thinking
from agentrl.schema import Message

_MIN_INTERVAL_SECONDS = 0.05
_PAUSE_PER_PARSE = 9
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

    A turn's own ids are the same in every rollout, and some frameworks keep the messages of all
    conversations together, where only the id identifies a call.
    """
    if "tool_calls" not in message:
        return message
    calls = [{**call, "id": f"{call['id']}_{mark}"} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def stopped_by(text: str, stop: tuple[str, ...]) -> str | None:
    """Return the first stop text in a text; None if there is none."""
    found = [(text.index(end), end) for end in stop if end in text]
    return min(found)[1] if found else None


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
    """

    def __init__(
        self,
        parse: Callable[[np.ndarray], Reply],
        on_delta: OnDelta,
        *,
        stop: tuple[str, ...] = (),
        calls_may_lead: bool = False,
    ) -> None:
        self._parse = parse
        self._on_delta = on_delta
        self._stop = stop
        self._calls_may_lead = calls_may_lead
        self._sent: dict[DeltaKind, str] = dict.fromkeys(DELTA_KINDS, "")
        self._due = 0.0

    def update(self, ids: np.ndarray) -> None:
        """Send the additions, at most every 50 ms, because all ids are parsed each time.

        A long reply is parsed less often: parsing takes at most a tenth of the event loop's time.
        """
        now = time.monotonic()
        if now < self._due:
            return
        reply = self._parse(ids)
        parsed_at = time.monotonic()
        self._due = parsed_at + max(_MIN_INTERVAL_SECONDS, _PAUSE_PER_PARSE * (parsed_at - now))
        content = reply.content
        if reply.reasoning.strip():
            content = content.lstrip()
            has_ended = has_finished_thinking(reply.text)
            thinking = reply.reasoning if has_ended else self._settled(reply.reasoning)
            self._send("reasoning_content", thinking)
        is_undecided = reply.tool_calls or content[:1].isspace()
        if not is_undecided and not (self._calls_may_lead and content[:1] in _OPENERS):
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
        """Return the part of a text that later tokens cannot change."""
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
