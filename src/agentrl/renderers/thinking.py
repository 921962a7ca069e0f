"""How models mark their thinking, and how to separate it from content."""

import re
from functools import cached_property

from agentrl.renderers.tool_calls.harmony import IN_CHANNELS, split_channels


class ThinkingMarks:
    """The marks that a family of models writes before and after its thinking."""

    def __init__(self, open_: str, close: str) -> None:
        """Store both marks; `open_` without the line break that some models put after it."""
        self.open, self.close = open_, close
        # Gemma 4's opening mark is a token and a word.
        self.tokens = (open_.removesuffix("thought"), close)

    @cached_property
    def either(self) -> re.Pattern[str]:
        """The pattern that finds the next mark."""
        return re.compile(f"{re.escape(self.open)}|{re.escape(self.close)}")

    @cached_property
    def empty(self) -> re.Pattern[str]:
        """The pattern that finds empty thinking and the space after it."""
        return re.compile(rf"{re.escape(self.open)}\s*{re.escape(self.close)}\s*")

    def ends_inside(self, text: str) -> bool:
        """Return whether a text ends inside a block of thinking."""
        return text.rfind(self.open) > text.rfind(self.close)


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
THINK = ThinkingMarks(THINK_OPEN, THINK_CLOSE)
_KINDS = (
    THINK,
    ThinkingMarks("[THINK]", "[/THINK]"),
    ThinkingMarks("<|channel>thought", "<channel|>"),
)


def thinking_marks(text: str) -> ThinkingMarks:
    """Return the marks that a chat template or a reply has; `<think>` if it has none."""
    return next((marks for marks in _KINDS if marks.open in text or marks.close in text), THINK)


def has_finished_thinking(text: str) -> bool:
    """Return whether a reply has ended its last block of thinking.

    Not the opposite of `ends_inside`: without any mark, the prompt may have opened a block.
    """
    if IN_CHANNELS.match(text):
        return bool(split_channels(text).content)
    marks = thinking_marks(text)
    return text.rfind(marks.close) > text.rfind(marks.open)


def without_thinking(text: str) -> str:
    """Return what follows the last block of thinking; the whole text if no block has ended."""
    if IN_CHANNELS.match(text):
        return split_channels(text).content or text
    return text.rpartition(thinking_marks(text).close)[2]


def split_reasoning(text: str, *, starts_inside: bool = False) -> tuple[str, str]:
    """Return (reasoning, visible text).

    Unclosed thinking is all reasoning. A closing mark without an opening one makes all text before
    it reasoning: the prompt may have opened the block.
    """
    if IN_CHANNELS.match(text):
        found = split_channels(text)
        return found.reasoning, found.content
    reasoning: list[str] = []
    visible: list[str] = []
    inside = starts_inside
    position = 0
    marks = thinking_marks(text)
    for mark in marks.either.finditer(text):
        is_opening = mark[0] == marks.open
        if is_opening and inside:
            continue
        piece = text[position : mark.start()]
        if is_opening:
            visible.append(piece)
        elif inside:
            reasoning.append(piece)
        else:
            reasoning += [*visible, piece]
            visible = []
        position, inside = mark.end(), is_opening
    (reasoning if inside else visible).append(text[position:])
    return "".join(reasoning), "".join(visible)
