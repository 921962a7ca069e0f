"""Tool calls in the text that a model wrote.

A parser takes visible text (thinking already removed) and returns what is left of it without the
calls, and the calls. It never raises: a call that cannot be read carries `format_error`, which is
shown to the model, so that it can do better in its next turn.
"""

import json
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from agentrl.errors import ConfigError

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_DEPTH = 32
_MAX_INT = 2**63


class ParsedCall(NamedTuple):
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    format_error: str | None


ToolCallParser = Callable[[str], tuple[str, list[ParsedCall]]]


class _FormatError(Exception):
    """Says to the model why its call cannot be read."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


def parse_hermes(text: str) -> tuple[str, list[ParsedCall]]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks (Hermes, Qwen).

    The end of a call is found by reading its JSON, so that a string argument may hold
    `</tool_call>` itself.
    """
    kept: list[str] = []
    calls: list[ParsedCall] = []
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        kept.append(text[position:start])
        call, position = _read_block(text, start + len(_OPEN))
        calls.append(call)
    kept.append(text[position:])
    return "".join(kept), calls


def _read_block(text: str, start: int) -> tuple[ParsedCall, int]:
    """Return the call that begins at `start` and the position behind its block."""
    try:
        value, end = _decode_json(text, _skip_space(text, start))
        call = _to_call(value)
        end = _skip_space(text, end)
        if not text.startswith(_CLOSE, end):
            found = "more text" if end < len(text) else "the end of the message"
            raise _FormatError(f"expected {_CLOSE} after the JSON object, found {found}", call.name)
    except _FormatError as error:
        call = ParsedCall(error.name, {}, str(error))
        close, again = text.find(_CLOSE, start), text.find(_OPEN, start)
        if close >= 0 and (again < 0 or close < again):
            return call, close + len(_CLOSE)
        return call, again if again >= 0 else len(text)
    return call, end + len(_CLOSE)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _refuse_constant(name: str) -> NoReturn:
    raise _FormatError(f"{name} is not a JSON value")


# `strict=False` admits raw line breaks inside strings, which models write in code arguments.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _decode_json(text: str, start: int) -> tuple[object, int]:
    if not text.startswith("{", start):
        raise _FormatError(f"expected a JSON object after {_OPEN}")
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        reason = f"invalid JSON: {error.msg} (character {error.pos - start} of the call)"
        raise _FormatError(reason) from None
    except ValueError:
        raise _FormatError("invalid JSON: a number has too many digits") from None
    except RecursionError:
        raise _FormatError("invalid JSON: nested too deeply") from None


def _to_call(value: object) -> ParsedCall:
    assert isinstance(value, dict)
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _FormatError('the call needs a "name" that is a non-empty string')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        # Some models write the arguments as OpenAI's wire form has them: JSON inside a string.
        arguments, end = _decode_json(arguments.strip(), 0)
        if end != len(value["arguments"].strip()):
            raise _FormatError('"arguments" must be one JSON object', name)
    if not isinstance(arguments, dict):
        raise _FormatError('"arguments" must be a JSON object', name)
    problem = _unstorable(value, 0)
    if problem is not None:
        raise _FormatError(problem, name if _unstorable(name, 0) is None else "")
    return ParsedCall(name.strip(), arguments, None)


def _unstorable(value: object, depth: int) -> str | None:
    """Say why a JSON value can be neither stored nor sent on, or return None."""
    if depth > _MAX_DEPTH:
        return f"the arguments are nested more than {_MAX_DEPTH} deep"
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and not -_MAX_INT <= value < _MAX_INT:
        return "a number does not fit 64 bits"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "a number is too large"
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        return "a string holds half of a surrogate pair"
    if isinstance(value, dict):
        if any("\0" in key for key in value):
            return "an argument name holds a NUL character"
        items: list[object] = [*value, *value.values()]
    elif isinstance(value, list):
        items = value
    else:
        return None
    return next((why for item in items if (why := _unstorable(item, depth + 1))), None)


_PARSERS: dict[str, ToolCallParser] = {
    "hermes": parse_hermes,
    "qwen": parse_hermes,
    "qwen25": parse_hermes,
}


def register_tool_call_parser(name: str, parser: ToolCallParser) -> None:
    """Make `parser` known under `name`.

    Raises:
        ConfigError: the name is taken by another parser.
    """
    if _PARSERS.setdefault(name, parser) is not parser:
        raise ConfigError(f"tool-call parser {name!r} is already registered")


def get_tool_call_parser(name: str) -> ToolCallParser:
    """Return the parser of that name.

    Raises:
        ConfigError: no parser has that name; the known ones are listed.
    """
    if name in _PARSERS:
        return _PARSERS[name]
    near = get_close_matches(name, _PARSERS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(sorted(_PARSERS))
    raise ConfigError(f"unknown tool-call parser {name!r}{hint} (known: {known})")
