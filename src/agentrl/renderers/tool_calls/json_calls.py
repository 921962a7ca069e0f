"""Formats that write calls as JSON: Hermes and Qwen, Llama 3, Mistral, OpenAI."""

import re
from functools import partial
from typing import Any

from agentrl.renderers.tool_calls.call_format import (
    CallSection,
    FormatError,
    ParsedCall,
    ToolCallFormat,
    Tools,
    call_between,
    call_of,
    checked,
    decode_json,
    decode_object,
    json_call,
    nine_alphanumerics,
    refused,
    skip_space,
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
_NAMED = re.compile(r"\s*+([\w./-]++)\s*+(?:\[CALL_ID\]\s*+(\w++)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_OPENAI_START = re.compile(r'[{\[]\s*(?:\{\s*)?"(?:tool_calls|id|type|function)"')
_CODE_CLOSE = re.compile(rf"{_CODE_END}\s*+(?={_CLOSE})")
_LLAMA_START = re.compile(r'\{\s*"(?:type|name)"')


def scan_hermes(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5 and 3).

    The end of a call is found by parsing its JSON, so a string argument may contain `</tool_call>`.
    Code may follow the JSON object inside `<code>` and becomes its argument `code`.
    """
    return call_between(text, start, _OPEN, _CLOSE, partial(_hermes_call, text))


def _hermes_call(text: str, position: int) -> tuple[ParsedCall, int]:
    value, end = decode_object(text, skip_space(text, position), _OPEN)
    nested = value.get("content")
    call = call_of(nested if "name" not in value and isinstance(nested, dict) else value)
    call, end = _with_code(text, call, skip_space(text, end))
    if not text.startswith(_CLOSE, end):
        found = "more text" if end < len(text) else "the end of the message"
        raise FormatError(f"expected {_CLOSE} after the JSON object, found {found}", call.name)
    return call, end + len(_CLOSE)


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
    return _llama3_calls(text, begin, begin + len(_PYTHON_TAG), _PYTHON_TAG)


def scan_llama3_bare(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find the same without its tag, as Llama 3.1 and 3.2 write most of their calls."""
    begin = skip_space(text, start)
    if not _LLAMA_START.match(text, begin):
        return None
    try:
        value, _ = decode_object(text, begin, "the beginning")
    except FormatError:
        return _llama3_calls(text, begin, begin, "the beginning")
    # The reply may be an answer in JSON rather than a call.
    if not {"parameters", "arguments"}.intersection(value):
        return None
    return _llama3_calls(text, begin, begin, "the beginning")


def _llama3_calls(text: str, begin: int, position: int, preceding: str) -> CallSection:
    calls: list[ParsedCall] = []
    while True:
        try:
            value, end = decode_object(text, skip_space(text, position), preceding)
            calls.append(call_of(value))
        except FormatError as error:
            calls.append(refused(error))
            return CallSection(begin, calls, len(text))
        after = skip_space(text, end)
        if not text.startswith(";", after):
            return CallSection(begin, calls, end)
        position, preceding = after + 1, "the semicolon"


def scan_mistral(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find `[TOOL_CALLS][{"name": ..., "arguments": ..., "id": ...}]` (Mistral up to v7).

    Later versions write `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, with a marker for every call.
    """
    begin = text.find(_TOOL_CALLS, start)
    if begin < 0:
        return None
    inside = begin + len(_TOOL_CALLS)
    try:
        named = _NAMED.match(text, inside)
        if named is not None:
            arguments, end = decode_object(text, named.end(), "the tool's name")
            return CallSection(begin, [checked(named[1], arguments, named[2] or "")], end)
        first = skip_space(text, inside)
        if not text.startswith(("[", "{"), first):
            raise FormatError(f"expected a JSON array of calls after {_TOOL_CALLS}")
        value, end = decode_json(text, first)
    except FormatError as error:
        next_call = text.find(_TOOL_CALLS, inside)
        return CallSection(begin, [refused(error)], next_call if next_call >= 0 else len(text))
    return CallSection(begin, _calls_of(value if isinstance(value, list) else [value]), end)


def scan_openai(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find a reply that is OpenAI's `tool_calls`: `{"tool_calls": [...]}`, or the array alone."""
    begin = skip_space(text, start)
    if not _OPENAI_START.match(text, begin):
        return None
    try:
        value, end = decode_json(text, begin)
    except FormatError as error:
        # The reply may be an answer in malformed JSON rather than a call.
        is_call = '"function"' in text or '"tool_calls"' in text
        return CallSection(begin, [refused(error)], len(text)) if is_call else None
    calls = value.get("tool_calls", [value]) if isinstance(value, dict) else value
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and "function" in call for call in calls
    ):
        return None
    return CallSection(begin, _calls_of([_openai_call(call) for call in calls]), end)


def _openai_call(value: dict[str, Any]) -> object:
    function = value["function"]
    return {**function, "id": value.get("id", "")} if isinstance(function, dict) else function


def _calls_of(values: list[Any]) -> list[ParsedCall]:
    """Return a call for every value; an error in one does not affect the others."""
    calls: list[ParsedCall] = []
    for value in values or [None]:
        try:
            calls.append(call_of(value))
        except FormatError as error:
            calls.append(refused(error))
    return calls


HERMES = ToolCallFormat(
    scan_hermes,
    begin=json_call("<tool_call>\n", "arguments"),
    write=one_by_one(named_object("arguments", "<tool_call>\n", "\n</tool_call>")),
    names=("hermes", "qwen", "qwen25"),
    example='<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>',
    giveaways=(_OPEN,),
)
LLAMA3 = ToolCallFormat(
    scan_llama3,
    scan_llama3_bare,
    control=(_PYTHON_TAG,),
    begin=json_call("", "parameters"),
    write=one_by_one(named_object("parameters"), "; "),
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
    scan_leading=scan_openai,
    own_id=re.compile(r"[\w.:-]{1,128}"),
    write=openai_calls,
    names=("openai",),
    example='{"tool_calls": [{"type": "function", "function": {"name": "NAME", "arguments": {}}}]}',
)
