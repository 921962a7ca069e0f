"""Replies told word by word while they are sampled."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agentrl.renderers import Reply
from agentrl.schema import Message

Kind = Literal["reasoning_content", "content"]
KINDS: tuple[Kind, ...] = ("reasoning_content", "content")
"""The parts of a message that consist of words, in the order in which they are said."""

_SECONDS_BETWEEN = 0.05
_MARKS = "<[{"
"""What tool calls and thinking begin with."""
_LONGEST_MARK = 40


@dataclass(frozen=True)
class Delta:
    """Words that go on from those of their kind before."""

    kind: Kind
    text: str


Listen = Callable[[Delta], None]


class Telling:
    """Tells a listener of a reply as far as it will stay as it is.

    Calls, and what follows them, are not told of: only the whole reply says whether they are any.
    Where the whole reply turns out to be another one after all (a stray `</think>` makes thinking
    of what was said, a call ends thinking that never did), the words that were told of stay in it.

    Args:
        read: takes ids apart.
        listen: is told.
        stop: texts before which the reply ends.
        calls_may_lead: a reply that begins with a brace or bracket may be a call.
    """

    def __init__(
        self,
        read: Callable[[np.ndarray], Reply],
        listen: Listen,
        *,
        stop: tuple[str, ...] = (),
        calls_may_lead: bool = False,
    ) -> None:
        self._read = read
        self._listen = listen
        self._stop = stop
        self._calls_may_lead = calls_may_lead
        self._told: dict[Kind, str] = dict.fromkeys(KINDS, "")
        self._due = 0.0

    def tell(self, ids: np.ndarray) -> None:
        """Tell of what was added.

        Args:
            ids: all ids so far, int32 [T].
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _SECONDS_BETWEEN
        reply = self._read(ids)
        content = reply.content
        if reply.reasoning.strip():
            content = content.lstrip()
            is_over = reply.text.rfind("</think>") > reply.text.rfind("<think>")
            thought = reply.reasoning if is_over else self._settled(reply.reasoning)
            self._tell("reasoning_content", thought)
        is_open = reply.tool_calls or content[:1].isspace()
        if not is_open and not (self._calls_may_lead and content[:1] in _MARKS):
            self._tell("content", self._settled(content))

    def whole(self, message: Message) -> Message:
        """Return the whole reply so that it goes on from what was told."""
        for kind, told in self._told.items():
            said = message.get(kind, "")
            if not said.startswith(told):
                message = {**message, kind: told + said}
        return message

    def _tell(self, kind: Kind, text: str) -> None:
        told = self._told[kind]
        if len(text) > len(told) and text.startswith(told):
            self._told[kind] = text
            self._listen(Delta(kind, text[len(told) :]))

    def _settled(self, text: str) -> str:
        """Return the beginning of a text that stays as it is whatever follows."""
        for stop in self._stop:
            text = text.partition(stop)[0]
        text = text.rstrip("\ufffd")  # a character of which not all bytes are there
        tail = max(0, len(text) - _LONGEST_MARK)
        ends = [place for mark in _MARKS if (place := text.find(mark, tail)) >= 0]
        ends += [
            len(text) - size
            for stop in self._stop
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        ]
        return text[: min(ends, default=len(text))].rstrip()


class Remainder:
    """Keeps what was told of a reply, for the words that are left at its end."""

    def __init__(self) -> None:
        self._lengths = dict.fromkeys(KINDS, 0)

    def count(self, delta: Delta) -> None:
        """Note that this was told."""
        self._lengths[delta.kind] += len(delta.text)

    def of(self, message: Message) -> list[Delta]:
        """Return what is left of a whole reply that goes on from what was told."""
        rests = ((kind, message.get(kind, "")[length:]) for kind, length in self._lengths.items())
        return [Delta(kind, text) for kind, text in rests if text]
