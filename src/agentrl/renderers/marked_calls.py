"""Formats that mark a call's parts with tags or tokens: Qwen3-Coder, Kimi K2, DeepSeek."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.renderers.call_values import (
    FormatError,
    ParsedCall,
    Section,
    Tools,
    checked,
    decode_json,
    decode_object,
    parameters_of,
    refused,
    skip_space,
)
from agentrl.renderers.json_calls import block_end

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
# A value may hold any of these tags, but hardly two of them in the order that ends it.
_PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>\s*</tool_call>)")
_FUNCTION_END = re.compile(r"\s*</function>\s*</tool_call>")

_KIMI_SECTION, _KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_HEAD = re.compile(r"\s*((?:functions\.)?([^\s:<]+?)(?::\d+)?)\s*(?=<\|tool_call_argument)")

_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"  # noqa: RUF001
_DEEPSEEK_SECTION_END = "<｜tool▁calls▁end｜>"  # noqa: RUF001
_DEEPSEEK_CALL, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
KIMI_TOKENS = (_KIMI_SECTION, _KIMI_SECTION_END, _KIMI_CALL, _KIMI_END, _KIMI_ARGUMENTS)
DEEPSEEK_TOKENS = (
    *(_DEEPSEEK_SECTION, _DEEPSEEK_SECTION_END),
    *(_DEEPSEEK_CALL, _DEEPSEEK_END, _DEEPSEEK_SEPARATOR),
)
_FENCED = re.compile(r"\s*([^\n`{<]+?)\s*\n\s*```(?:json)?\s*(?=\{)")


def scan_qwen3_coder(text: str, start: int, tools: Tools) -> Section | None:
    """Find `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

    Values are plain text; the tool's schema says what they mean.
    """
    begin = text.find(_OPEN, start)
    if begin < 0:
        return None
    inside = begin + len(_OPEN)
    try:
        call, end = _xml_call(text, inside, tools)
    except FormatError as error:
        return Section(begin, [refused(error)], block_end(text, inside, _OPEN, _CLOSE))
    return Section(begin, [call], end)


def _xml_call(text: str, position: int, tools: Tools) -> tuple[ParsedCall, int]:
    function = _FUNCTION.match(text, position)
    if function is None:
        raise FormatError(f"expected <function=NAME> after {_OPEN}")
    name, position = function[1].strip(), function.end()
    schemas = parameters_of(name, tools)
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, position)) is not None:
        key = parameter[1].strip()
        end = _PARAMETER_END.search(text, parameter.end())
        if end is None:
            raise FormatError(f"parameter {key!r} has no end", name)
        raw = text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
        if key in arguments:
            raise FormatError(f"parameter {key!r} is given twice", name)
        arguments[key] = _typed(name, key, raw, schemas.get(key))
        position = end.end()
    end = _FUNCTION_END.match(text, position)
    if end is None:
        raise FormatError(f"expected a parameter or </function> and {_CLOSE}", name)
    return checked(name, arguments), end.end()


def _typed(name: str, key: str, raw: str, schema: object) -> object:
    """Return the value that a parameter's text stands for under its schema."""
    kinds = _kinds(schema)
    if not kinds or kinds == {"string"}:
        return raw
    value = _as_json(raw.strip())
    if _kind_fits(value, kinds):
        return value
    if "string" in kinds:
        return raw
    raise FormatError(f"parameter {key!r}: {raw[:80]!r} is not of type {', '.join(kinds)}", name)


def _as_json(text: str) -> object:
    """Return what a text means as JSON; words as Python writes them are taken too."""
    words: dict[str, object] = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value, end = decode_json(text, 0)
    except FormatError:
        return text
    return value if end == len(text) else text


def _kind_fits(value: object, kinds: set[str]) -> bool:
    if value is None:
        return "null" in kinds
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, float):
        return "number" in kinds
    if isinstance(value, int):
        return bool(kinds & {"number", "integer"})
    # A text that a schema of other kinds is held against did not turn out to be one of them.
    return (isinstance(value, list) and "array" in kinds) or (
        isinstance(value, dict) and "object" in kinds
    )


def _kinds(schema: object) -> set[str]:
    """Return the JSON types that a schema admits; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(one) for one in kind}
    parts = [part for key in ("anyOf", "oneOf") for part in schema.get(key) or ()]
    if parts:
        return set().union(*map(_kinds, parts))
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return {_KIND_NAMES[json.dumps(value)[0]] for value in values} if values else set()


_KIND_NAMES = {
    **dict.fromkeys("-0123456789", "number"),
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
    "[": "array",
    "{": "object",
}


def scan_kimi_k2(text: str, start: int, tools: Tools) -> Section | None:
    """Find `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""
    return _scan_calls(text, start, (_KIMI_SECTION, _KIMI_SECTION_END), _KIMI_CALL, _kimi_call)


def _kimi_call(text: str, position: int) -> tuple[ParsedCall, int]:
    head = _KIMI_HEAD.match(text, position)
    if head is None:
        raise FormatError(f"expected functions.NAME:NUMBER and {_KIMI_ARGUMENTS}")
    position = text.index(_KIMI_ARGUMENTS, head.end()) + len(_KIMI_ARGUMENTS)
    try:
        arguments, end = decode_object(text, skip_space(text, position), _KIMI_ARGUMENTS)
        return checked(head[2], arguments, head[1]), _closed(text, end, _KIMI_END)
    except FormatError as error:
        raise FormatError(str(error), head[2]) from None


def scan_deepseek(text: str, start: int, tools: Tools) -> Section | None:
    """Find DeepSeek's calls: V3 and R1 fence the arguments, V3.1 does not."""
    section = (_DEEPSEEK_SECTION, _DEEPSEEK_SECTION_END)
    return _scan_calls(text, start, section, _DEEPSEEK_CALL, _deepseek_call)


def _deepseek_call(text: str, position: int) -> tuple[ParsedCall, int]:
    separator = text.find(_DEEPSEEK_SEPARATOR, position)
    if separator < 0:
        raise FormatError(f"expected NAME{_DEEPSEEK_SEPARATOR}")
    name = text[position:separator].strip()
    position = separator + len(_DEEPSEEK_SEPARATOR)
    fence = _FENCED.match(text, position) if name == "function" else None
    try:
        if fence is None:
            arguments, end = decode_object(text, skip_space(text, position), _DEEPSEEK_SEPARATOR)
        else:
            name = fence[1]
            arguments, end = decode_object(text, fence.end(), "the fence")
            end = _closed(text, end, "```")
        return checked(name, arguments), _closed(text, end, _DEEPSEEK_END)
    except FormatError as error:
        raise FormatError(str(error), name) from None


def _closed(text: str, position: int, close: str) -> int:
    position = skip_space(text, position)
    if not text.startswith(close, position):
        raise FormatError(f"expected {close} after the arguments")
    return position + len(close)


def _scan_calls(
    text: str,
    start: int,
    section: tuple[str, str],
    open_: str,
    read: Callable[[str, int], tuple[ParsedCall, int]],
) -> Section | None:
    """Read the calls of a section; its own begin and end may be missing."""
    found = [at for mark in (section[0], open_) if (at := text.find(mark, start)) >= 0]
    if not found:
        return None
    begin = position = min(found)
    if text.startswith(section[0], begin):
        position = skip_space(text, begin + len(section[0]))
    calls: list[ParsedCall] = []
    while text.startswith(open_, position):
        inside = position + len(open_)
        try:
            call, position = read(text, inside)
        except FormatError as error:
            call = refused(error)
            position = min(
                at if (at := text.find(mark, inside)) >= 0 else len(text)
                for mark in (open_, section[1])
            )
        calls.append(call)
        position = skip_space(text, position)
    if not calls:
        calls.append(refused(FormatError(f"expected {open_} after {section[0]}")))
    end = position
    if text.startswith(section[1], position):
        end = position + len(section[1])
    return Section(begin, calls, end)
