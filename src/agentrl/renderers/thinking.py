"""How models mark their thinking, and how to tell it from what they say."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


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
    while True:
        close = text.find(THINK_CLOSE, position)
        if inside:
            end = close if close >= 0 else len(text)
            reasoning.append(text[position:end])
            if close < 0:
                break
            position, inside = close + len(THINK_CLOSE), False
            continue
        open_ = text.find(THINK_OPEN, position)
        if close >= 0 and (open_ < 0 or close < open_):
            reasoning += [*visible, text[position:close]]
            visible = []
            position = close + len(THINK_CLOSE)
        elif open_ >= 0:
            visible.append(text[position:open_])
            position, inside = open_ + len(THINK_OPEN), True
        else:
            visible.append(text[position:])
            break
    return "".join(reasoning), "".join(visible)
