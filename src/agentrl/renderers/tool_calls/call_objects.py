"""Calls that are JSON objects, under the keys of whichever format the model remembers."""

import re
from collections.abc import Sequence
from typing import Any

from agentrl.renderers.tool_calls.call_format import (
    SHOWN_CHARS,
    CallSection,
    FormatError,
    ParsedCall,
    Tools,
    checked,
    decode_json,
    refused,
    schemas_of,
    skip_space,
)

_NAME_KEYS = ("name", "tool_name", "tool", "function")
"""Keys under which models write the name of a tool."""
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "params", "input")
"""Keys under which models write the arguments, in formats that ask for one of them."""
_WRAPPER_KEYS = ("function", "content")
"""Keys under which models write the object with name and arguments."""
_OTHER_KEYS = ("id", "type", "index", "tool_call_id")
"""Keys of OpenAI's and Cohere's wire formats that are no part of the call."""
_TYPES = ("function", "function_call", "tool_call", "tool_use")
"""Types under which the wire formats of model providers send calls."""
_SHOWN_KEYS = 5
_TOOL_CALLS = "tool_calls"
_OBJECTS = re.compile(r"\s*+\[?\s*+\{\s*+\"")
_SEPARATOR = re.compile(r"\s*+([;,]?)\s*+")
_CALL_KEYS = re.compile(r'"(?:tool_calls|arguments|parameters)"\s*+:|"function"\s*+:\s*+\{')
_CALL_NAME = re.compile(r'"(?:name|tool_name|tool|function)"\s*+:\s*+"([^"\\]*+)"')


def call_of(value: object) -> ParsedCall:
    """Return the call that `{"name": ..., "arguments": {...}}` means.

    Models also write the names that other formats have for the same (`_ARGUMENT_KEYS`, `_NAME_KEYS`),
    or OpenAI's nesting. A key that is none of these may hold what the model meant as arguments, so it
    is an error that the model reads, never left out.
    """
    if not isinstance(value, dict):
        raise FormatError("a call is a JSON object")
    parts = _unwrapped(value)
    name_key = _only_key(parts, _NAME_KEYS, "the call names its tool twice") or "name"
    name = parts.get(name_key)
    if not isinstance(name, str) or not name.strip():
        raise FormatError('the call needs a "name" that is a non-empty string')
    found = _only_key(parts, _ARGUMENT_KEYS, "the call has its arguments twice", name)
    key = found or "arguments"
    # Beside a bare name, an id is more likely an argument.
    others = ("type",) if found is None and parts is value else _OTHER_KEYS
    unknown = [other for other in parts if other not in (name_key, key, *others)]
    if unknown:
        raise FormatError(
            f'a call has the keys "name" and "{key}", not {_shown(unknown)}; '
            f'put arguments into "{key}"',
            name,
        )
    if parts.get("type", "function") not in _TYPES:
        raise FormatError('a call\'s "type" is "function"', name)
    id_ = parts.get("id", "")
    return checked(name, parts.get(key, {}), id_ if isinstance(id_, str) else "", key=key)


def _unwrapped(value: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a call, and those beside the object that it is wrapped in."""
    for wrapper in _WRAPPER_KEYS:
        inner = value.get(wrapper)
        if isinstance(inner, dict) and "name" not in value:
            outer = {key: part for key, part in value.items() if key != wrapper}
            twice = [key for key in inner if key in outer]
            if twice:
                name = inner.get("name")
                raise FormatError(
                    f'the call has {_shown(twice)} both inside "{wrapper}" and beside it',
                    name if isinstance(name, str) else "",
                )
            return inner | outer
    return value


def _only_key(
    value: dict[str, Any], names: Sequence[str], problem: str, tool: str = ""
) -> str | None:
    found = [name for name in names if name in value]
    if len(found) > 1:
        raise FormatError(f'{problem}: in "{found[0]}" and in "{found[1]}"', tool)
    return found[0] if found else None


def _shown(keys: Sequence[str]) -> str:
    return ", ".join(f'"{key[:SHOWN_CHARS]}"' for key in keys[:_SHOWN_KEYS])


def calls_of(value: object) -> list[ParsedCall]:
    """Return the calls of an object, an array of objects, or OpenAI's `{"tool_calls": [...]}`.

    An error in one call does not affect the others.
    """
    try:
        values = _listed(value)
    except FormatError as error:
        return [refused(error)]
    calls: list[ParsedCall] = []
    for item in values:
        try:
            calls.append(call_of(item))
        except FormatError as error:
            calls.append(refused(error))
    return calls


def _call_list(value: object) -> object:
    """Return what OpenAI's message of calls holds, or None for anything else."""
    found = value.get(_TOOL_CALLS) if isinstance(value, dict) else None
    return found if isinstance(found, list | dict) else None


def _listed(value: object) -> list[Any]:
    found = _call_list(value)
    if isinstance(value, dict) and found is not None:
        lost = [
            key
            for key, part in value.items()
            if key not in (_TOOL_CALLS, "role") and part not in (None, "")
        ]
        if lost:
            raise FormatError(f'a message of calls has nothing beside "tool_calls": {_shown(lost)}')
        value = found
    values = value if isinstance(value, list) else [value]
    if not values:
        raise FormatError("the array holds no call")
    return values


def is_object_next(text: str, position: int) -> bool:
    """Return whether an object, or an array of them, follows."""
    return _OBJECTS.match(text, position) is not None


def read_objects(text: str, begin: int, position: int, mark: str) -> CallSection:
    """Read objects or arrays of calls from `position` on, until something else follows."""
    calls: list[ParsedCall] = []
    preceding = mark or "the beginning"
    while True:
        position = skip_space(text, position)
        try:
            if not text.startswith(("{", "["), position):
                raise FormatError(f"expected a JSON object after {preceding}")
            value, end = decode_json(text, position)
        except FormatError as error:
            next_mark = text.find(mark, position) if mark else -1
            return CallSection(
                begin, [*calls, refused(error)], next_mark if next_mark >= 0 else len(text)
            )
        calls += calls_of(value)
        separator = _SEPARATOR.match(text, end)
        assert separator is not None
        position, preceding = separator.end(), repr(separator[1])
        if not (separator[1] or is_object_next(text, position)) or position == len(text):
            return CallSection(begin, calls, end)


def scan_bare_objects(text: str, start: int, tools: Tools) -> CallSection | None:
    """Find calls at the beginning of a reply that has no marks."""
    begin = skip_space(text, start)
    if not is_object_next(text, begin):
        return None
    try:
        value, _ = decode_json(text, begin)
    except FormatError:
        named = _CALL_NAME.search(text, begin)
        is_call = named is not None and named[1] in schemas_of(tools)
        is_call = is_call or _CALL_KEYS.search(text, begin) is not None
    else:
        values = value if isinstance(value, list) else [value]
        is_call = any(_call_list(item) or _is_call(item, tools) for item in values)
    return read_objects(text, begin, begin, "") if is_call else None


def _is_call(value: object, tools: Tools) -> bool:
    """Return whether an object is a call rather than an answer in JSON.

    A call has arguments and the name of a tool that the model was shown, under any of their keys.
    Of other tools, which a model makes up, only the documented form is one: `name` beside an object
    `arguments` or `parameters`.
    """
    if not isinstance(value, dict):
        return False
    inner = value.get("function")
    parts = inner if isinstance(inner, dict) else value
    name = next((parts[key] for key in _NAME_KEYS if key in parts), None)
    has_arguments = any(key in parts for key in _ARGUMENT_KEYS)
    if isinstance(name, str) and name in schemas_of(tools):
        return has_arguments or parts is inner
    arguments = parts.get("arguments", parts.get("parameters"))
    is_object = isinstance(arguments, str) and arguments.lstrip().startswith("{")
    return isinstance(parts.get("name"), str) and (is_object or isinstance(arguments, dict))
