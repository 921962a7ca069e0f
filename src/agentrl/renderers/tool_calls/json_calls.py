"""Formats that write calls as JSON: Hermes and Qwen, Llama 3, Mistral, OpenAI."""

import re
from functools import partial

from agentrl.renderers.tool_calls.call_format import (
    CallSection,
    FormatError,
    ParsedCall,
    ToolCallFormat,
    Tools,
    beginning,
    checked,
    decode_object,
    marked_format,
    nine_alphanumerics,
    refused,
    schemas_of,
    skip_space,
)
from agentrl.renderers.tool_calls.call_objects import (
    call_of,
    is_object_next,
    read_objects,
    scan_bare_objects,
)
from agentrl.renderers.tool_calls.call_writers import (
    mistral_calls,
    named_object,
    one_by_one,
    openai_calls,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CODE, _CODE_END = "<code>", "</code>"
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"
# Positions at which a Mistral call gives name, id and arguments in sequence.
_NAMED = re.compile(r"\s*+([\w./-]++)\s*+(?:\[CALL_ID\]\s*+(\w++)\s*+)?(\[ARGS\]\s*+)?(?=\{)")
_CODE_CLOSE = re.compile(rf"{_CODE_END}\s*+(?={_CLOSE})")


def _read_hermes(text: str, position: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    """Read `{"name": ..., "arguments": {...}}` (Hermes, Qwen 2.5 and 3).

    The end of a call is found by parsing its JSON, so a string argument may contain `</tool_call>`.
    Code may follow the JSON object inside `<code>` and becomes its argument `code`.
    """
    value, end = decode_object(text, skip_space(text, position), _OPEN)
    call, end = _with_code(text, call_of(value), skip_space(text, end))
    return [call], end


def _with_code(text: str, call: ParsedCall, start: int) -> tuple[ParsedCall, int]:
    """Read the `<code>` block at `start`, if there is one."""
    if not text.startswith(_CODE, start):
        return call, start
    # Code may contain either closing tag; both together end the call.
    match = _CODE_CLOSE.search(text, start)
    if match is None:
        raise FormatError(f"expected {_CODE_END} and {_CLOSE} after {_CODE}", call.name)
    code = text[start + len(_CODE) : match.start()].strip("\n")
    if call.arguments.get("code"):
        raise FormatError('code is given twice: in "arguments" and inside <code>', call.name)
    return checked(call.name, {**call.arguments, "code": code}, call.id), match.end()


def scan_llama3(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find `<|python_tag|>{"name": ..., "parameters": {...}}`, several separated by semicolons."""
    begin = text.find(_PYTHON_TAG, start)
    if begin < 0:
        return None
    return read_objects(text, begin, begin + len(_PYTHON_TAG), _PYTHON_TAG)


def scan_mistral(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find `[TOOL_CALLS][{"name": ..., "arguments": ..., "id": ...}]` (Mistral up to v7).

    Later versions write `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, with a marker for every call.
    """
    begin = text.find(_TOOL_CALLS, start)
    if begin < 0:
        return None
    calls, position = _named_calls(text, begin + len(_TOOL_CALLS), tools)
    if calls and not is_object_next(text, position):
        return CallSection(begin, calls, position)
    objects = read_objects(text, begin, position, _TOOL_CALLS)
    return CallSection(begin, [*calls, *objects.calls], objects.end)


def _named_calls(text: str, position: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    """Return the calls that begin with the tool's name, and where they end."""
    calls: list[ParsedCall] = []
    while (named := _NAMED.match(text, position)) is not None:
        if calls and not (named[3] or named[1] in schemas_of(tools)):
            break  # a word of the text that follows
        try:
            arguments, position = decode_object(text, named.end(), "the tool's name")
            calls.append(checked(named[1], arguments, named[2] or ""))
        except FormatError as error:
            next_call = text.find(_TOOL_CALLS, position)
            error.name = named[1]
            return [*calls, refused(error)], next_call if next_call >= 0 else len(text)
    return calls, position


def read_list(text: str, position: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    """Read objects or arrays of calls: the body of many families' marks."""
    section = read_objects(text, position, position, "")
    return section.calls, section.end


_WRITE_LLAMA3 = one_by_one(named_object("parameters"), "; ")
HERMES = marked_format(
    *("hermes qwen qwen25", _OPEN, _CLOSE, _read_hermes),
    one_by_one(named_object("arguments", "<tool_call>\n", "\n</tool_call>")),
    control=(),
)
LLAMA3 = ToolCallFormat(
    scan_llama3,
    scan_bare_objects,
    control=(_PYTHON_TAG,),
    begin=partial(beginning, _WRITE_LLAMA3),
    write=_WRITE_LLAMA3,
    names=("llama3",),
    example='{"name": "NAME", "parameters": {"KEY": "VALUE"}}',
    giveaways=(_PYTHON_TAG, '"parameters": dictionary'),
)
MISTRAL = ToolCallFormat(
    scan_mistral,
    call_id=nine_alphanumerics,
    own_id=re.compile("[A-Za-z0-9]{9}"),
    control=(_TOOL_CALLS, "[CALL_ID]", "[ARGS]"),
    write=mistral_calls,
    names=("mistral",),
    example='[TOOL_CALLS][{"name": "NAME", "arguments": {"KEY": "VALUE"}}]',
    giveaways=(_TOOL_CALLS,),
)
OPENAI = ToolCallFormat(
    scan_leading=scan_bare_objects,
    own_id=re.compile(r"[\w.:-]{1,128}"),
    write=openai_calls,
    names=("openai",),
    example='{"tool_calls": [{"type": "function", "function": {"name": "NAME", "arguments": {}}}]}',
)
