"""The final answer in what a model said."""

from agentrl.renderers.reply import split_reasoning


def extract_answer(text: str, schema: str = "answer") -> str | None:
    r"""Return the final answer in a model's text, or None if it gave none.

    Args:
        text: what the model wrote; thinking in it is left out of account.
        schema: `boxed` (the last `\boxed{}`, else the last `\fbox{}`), or the name of a tag
            (its last closed pair).
    """
    _, visible = split_reasoning(text)
    if schema == "boxed":
        answer = _last_braced(visible, r"\boxed")
        return answer if answer is not None else _last_braced(visible, r"\fbox")
    open_, close = f"<{schema}>", f"</{schema}>"
    end = visible.rfind(close)
    start = visible.rfind(open_, 0, end) if end >= 0 else -1
    return visible[start + len(open_) : end].strip() if start >= 0 else None


def _last_braced(text: str, command: str) -> str | None:
    """Return the argument of the last complete `command{...}`."""
    start = len(text)
    while (start := text.rfind(command, 0, start)) >= 0:
        open_ = start + len(command)
        while open_ < len(text) and text[open_].isspace():
            open_ += 1
        if text.startswith("{", open_) and (end := _closing_brace(text, open_)) is not None:
            return text[open_ + 1 : end].strip()
    return None


def _closing_brace(text: str, open_: int) -> int | None:
    depth = 0
    position = open_
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1  # an escaped brace is a character of the answer
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None
