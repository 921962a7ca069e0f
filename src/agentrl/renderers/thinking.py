"""How models mark their thinking, and how to tell it from what they say."""

import re

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
THINK_MARKS = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}")


def ends_inside_thinking(text: str) -> bool:
    """Return whether a text ends inside a block of thinking."""
    return text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE)


def has_finished_thinking(text: str) -> bool:
    """Return whether a reply has ended its last block of thinking.

    Not the contrary of `ends_inside_thinking`: without any mark, the prompt may have begun a block.
    """
    return text.rfind(THINK_CLOSE) > text.rfind(THINK_OPEN)


def without_thinking(text: str) -> str:
    """Return what follows the last block of thinking; the whole text where none has ended."""
    return text.rpartition(THINK_CLOSE)[2]


def split_reasoning(text: str, *, starts_inside: bool = False) -> tuple[str, str]:
    """Return (reasoning, visible text).

    Thinking that never ends is all reasoning. A `</think>` without its beginning makes all text
    before it reasoning: the prompt may have opened the block.

    Args:
        text: what the model wrote.
        starts_inside: the prompt ended inside a `<think>` block.
    """
    reasoning: list[str] = []
    visible: list[str] = []
    inside = starts_inside
    position = 0
    for mark in THINK_MARKS.finditer(text):
        opens = mark[0] == THINK_OPEN
        if opens and inside:
            continue
        piece = text[position : mark.start()]
        if opens:
            visible.append(piece)
        elif inside:
            reasoning.append(piece)
        else:
            reasoning += [*visible, piece]
            visible = []
        position, inside = mark.end(), opens
    (reasoning if inside else visible).append(text[position:])
    return "".join(reasoning), "".join(visible)
