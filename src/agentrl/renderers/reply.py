"""What a model said in one turn, taken apart."""

from dataclasses import dataclass

from agentrl.renderers.tool_calls import ToolCallParser
from agentrl.schema import Message, ToolCall

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Reply:
    """One turn of the model."""

    text: str
    """Everything it wrote, the end-of-turn token excepted."""
    content: str
    """What is outside thinking and outside tool calls: where an answer may stand."""
    reasoning: str
    """What is inside `<think>`."""
    tool_calls: tuple[ToolCall, ...]

    @property
    def message(self) -> Message:
        """The assistant message that stands for this turn in the conversation."""
        return {"role": "assistant", "content": self.text}


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
        close = text.find(_CLOSE, position)
        if inside:
            end = close if close >= 0 else len(text)
            reasoning.append(text[position:end])
            if close < 0:
                break
            position, inside = close + len(_CLOSE), False
            continue
        open_ = text.find(_OPEN, position)
        if close >= 0 and (open_ < 0 or close < open_):
            reasoning += [*visible, text[position:close]]
            visible = []
            position = close + len(_CLOSE)
        elif open_ >= 0:
            visible.append(text[position:open_])
            position, inside = open_ + len(_OPEN), True
        else:
            visible.append(text[position:])
            break
    return "".join(reasoning), "".join(visible)


def parse_reply(text: str, parser: ToolCallParser, *, starts_inside: bool, turn: int) -> Reply:
    """Take the text of one turn apart; calls are numbered `call_{turn}_{position}`."""
    reasoning, visible = split_reasoning(text, starts_inside=starts_inside)
    content, parsed = parser(visible)
    calls = tuple(
        ToolCall(
            id=f"call_{turn}_{position}",
            name=call.name,
            arguments=call.arguments,
            format_error=call.format_error,
        )
        for position, call in enumerate(parsed)
    )
    return Reply(text=text, content=content, reasoning=reasoning, tool_calls=calls)
