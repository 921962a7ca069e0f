"""The call that a chat template itself writes: the format that reads it back is the model's."""

import json
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from agentrl.errors import RenderError
from agentrl.renderers.chat_template import ChatTemplate
from agentrl.renderers.reply import parse_reply
from agentrl.renderers.thinking import thinking_marks
from agentrl.renderers.tool_calls.call_format import ToolCallFormat
from agentrl.schema import Message

_NAME = "look_up"
_FLAT = {"word": "north star"}
_NESTED = _FLAT | {"options": {"limit": 3, "exact": True, "fields": ["name", "date"]}}
_PROPERTIES = {
    "word": {"type": "string", "description": "x"},
    "options": {"type": "object", "description": "x", "properties": {}},
}
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": ["word"]}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "x", "parameters": _SCHEMA},
}
_QUESTION: Message = {"role": "user", "content": "x"}


def own_format(
    template: ChatTemplate, formats: Sequence[ToolCallFormat]
) -> tuple[ToolCallFormat, str]:
    """Return the first format that reads the call that a template writes, and an empty text.

    If none does, the first format and the text that it does not read; this is empty if the template
    shows no call. A template that writes nested values in no form of its own, but as Python prints
    them, is read by the format of its plain values.
    """
    unread = ""
    for arguments in (_NESTED, _FLAT):
        for format_ in formats:
            text, inside = _written(template, format_, arguments)
            unread = unread or text
            if text and _is_read(format_, text, inside, arguments, template):
                return format_, ""
    return formats[0], unread


def _is_read(
    format_: ToolCallFormat,
    text: str,
    inside: bool,
    arguments: Mapping[str, Any],
    template: ChatTemplate,
) -> bool:
    marks = thinking_marks(template.source)
    reply = parse_reply(text, format_, starts_inside=inside, tools=(_TOOL,), marks=marks)
    return [(call.name, call.arguments) for call in reply.tool_calls] == [(_NAME, arguments)]


def _written(
    template: ChatTemplate, format_: ToolCallFormat, arguments: Mapping[str, Any]
) -> tuple[str, bool]:
    """Return a reply with a call behind the prompt, and whether the prompt has begun its thinking."""
    named = format_.named_id
    id_ = format_.call_id(0, 0) if named is None else named(_NAME, 0)
    for given in (arguments, json.dumps(arguments)):
        function = {"name": _NAME, "arguments": given}
        call = {"id": id_, "type": "function", "function": function}
        reply: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            prompt = template.render([_QUESTION], (_TOOL,), add_generation_prompt=True)
            closed = template.render([_QUESTION, reply], (_TOOL,), add_generation_prompt=False)
        except RenderError:
            continue
        if closed.startswith(prompt):
            text = closed[len(prompt) :]
            return text if _NAME in text else "", thinking_marks(template.source).ends_inside(
                prompt
            )
        # The template writes a reply differently than its prompt: a mark is not cut in two.
        shared = len(commonprefix([prompt, closed]))  # noqa: RUF071
        text = closed[1 + max(closed.rfind(end, 0, shared) for end in "\n >]") :]
        return text if _NAME in text else "", False
    return "", False
