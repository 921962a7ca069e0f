"""Formats of named `invoke` and `parameter` tags: MiniMax M2, and DeepSeek from V3.2 on (DSML).

A section holds any number of invocations. MiniMax leaves the meaning of a value to the tool's
schema; DeepSeek marks each value as string or not, and may write all of them as one JSON object.
"""

import re
from functools import partial
from typing import Any

from agentrl.renderers.tool_calls.call_format import (
    CallSection,
    FormatError,
    ParsedCall,
    ToolCallFormat,
    Tools,
    block_end,
    checked,
    decode_object,
    refused,
    skip_space,
    tool_name,
)
from agentrl.renderers.tool_calls.call_writers import between, invocation, one_by_one
from agentrl.renderers.tool_calls.typed_values import ArgumentTags, Parameters


class _Tags:
    """The tags of one family.

    Attributes:
        prefix: text before the names of the tags inside a section.
        open: starts a section.
        close: ends it.
        arguments: the tags of the arguments.
    """

    def __init__(self, section: str, prefix: str = "") -> None:
        mark = re.escape(prefix)
        self.prefix = prefix
        self.open, self.close = f"<{section}>", f"</{section}>"
        self.invoke_end = f"</{prefix}invoke>"
        self.invoke = re.compile(rf'\s*+<{mark}invoke name="([^"\n<>]*+)">')
        parameter = re.compile(
            rf'<{mark}parameter name="([^"\n<>]*+)"(?: string="(true|false)")?+>'
        )
        # A value may contain any of these tags, but is unlikely to contain two in the order that
        # ends it.
        value_end = re.compile(rf"</{mark}parameter>\s*+(?=<{mark}parameter name=|</{mark}invoke>)")
        self.arguments = ArgumentTags(parameter, f"</{prefix}parameter>", value_end, parameter)


def _scan(tags: _Tags, text: str, start: int, tools: Tools) -> CallSection | None:
    """Find the next section."""
    begin = text.find(tags.open, start)
    if begin < 0:
        return None
    position = begin + len(tags.open)
    calls: list[ParsedCall] = []
    try:
        while (head := tags.invoke.match(text, position)) is not None:
            call, position = _read_invocation(tags, text, head, tools)
            calls.append(call)
        position = skip_space(text, position)
        if not calls:
            raise FormatError(f"expected an invoke tag with a name after {tags.open}")
        if not text.startswith(tags.close, position):
            raise FormatError(f"expected {tags.close} or another invoke tag")
    except FormatError as error:
        after = block_end(text, position, tags.open, tags.close)
        return CallSection(begin, [*calls, refused(error)], after)
    return CallSection(begin, calls, position + len(tags.close))


def _read_invocation(
    tags: _Tags, text: str, head: re.Match[str], tools: Tools
) -> tuple[ParsedCall, int]:
    """Return the call that a head starts, and the position after it."""
    name, position = tool_name(head[1], tools), head.end()
    given: dict[str, Any] = {}
    try:
        if text.startswith("{", skip_space(text, position)):
            given, position = decode_object(text, skip_space(text, position), "the name")
        arguments, position = Parameters(name, tools).read(text, position, tags.arguments, given)
        if not text.startswith(tags.invoke_end, position):
            raise FormatError(f"expected a parameter or {tags.invoke_end}")
        return checked(name, arguments), position + len(tags.invoke_end)
    except FormatError as error:
        error.name = error.name or name
        raise


def _format(tags: _Tags, names: tuple[str, ...], control: tuple[str, ...]) -> ToolCallFormat:
    def begin(tool: str | None) -> str:
        rest = "" if tool is None else f'<{tags.prefix}invoke name="{tool}">\n'
        return f"{tags.open}\n{rest}"

    is_text = ' string="true"' if tags.prefix else ""
    parameter = f'<{tags.prefix}parameter name="KEY"{is_text}>VALUE</{tags.prefix}parameter>'
    example = f"{begin('NAME')}{parameter}\n{tags.invoke_end}\n{tags.close}"
    return ToolCallFormat(
        partial(_scan, tags),
        control=control,
        write=between(f"{tags.open}\n", one_by_one(invocation(tags.prefix)), f"\n{tags.close}"),
        begin=begin,
        names=names,
        giveaways=(tags.open,),
        example=example,
    )


_DSML = "｜DSML｜"  # noqa: RUF001
MINIMAX_M2 = _format(
    _Tags("minimax:tool_call"),
    ("minimax_m2",),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)
DEEPSEEK_V32 = _format(_Tags(f"{_DSML}function_calls", _DSML), ("deepseekv32",), (_DSML,))
DEEPSEEK_V4 = _format(_Tags(f"{_DSML}tool_calls", _DSML), ("deepseekv4",), (_DSML,))
