"""Writes calls in each format, for models whose chat template shows none.

Calls in, text out; the scanner of the same format reads it back. A value that the format cannot
hold (an XML value that contains its own end tag) reads back differently; callers compare.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class CallToWrite(NamedTuple):
    """One call of a message."""

    name: str
    arguments: Any
    """An object; anything else cannot be read back."""
    id: str = ""


CallWriter = Callable[[Sequence[CallToWrite]], str]
_PLAIN_KEY = re.compile(r"(?![\"'])[^\s:,{}\[\]<]+")


def one_by_one(write: Callable[[CallToWrite], str], separator: str = "\n") -> CallWriter:
    """Return the writer that writes one call after another."""
    return lambda calls: separator.join(map(write, calls))


def between(before: str, write: CallWriter, after: str) -> CallWriter:
    """Return the writer that puts marks around all calls of a message."""
    return lambda calls: f"{before}{write(calls)}{after}"


def named_object(key: str, before: str = "", after: str = "") -> Callable[[CallToWrite], str]:
    """Return the writer of `{"name": ..., KEY: {...}}` between two marks."""

    def write(call: CallToWrite) -> str:
        return before + as_json({"name": call.name, key: call.arguments}) + after

    return write


def object_list(name: str, key: str, calls: Sequence[CallToWrite]) -> str:
    """Write `[{NAME: ..., KEY: {...}}]`."""
    return as_json([{name: call.name, key: call.arguments} for call in calls])


def mistral_calls(calls: Sequence[CallToWrite]) -> str:
    """Write `[TOOL_CALLS][{"name": ..., "arguments": ..., "id": ...}]`."""
    objects = [
        {"name": call.name, "arguments": call.arguments, **({"id": call.id} if call.id else {})}
        for call in calls
    ]
    return f"[TOOL_CALLS]{as_json(objects)}"


def openai_calls(calls: Sequence[CallToWrite]) -> str:
    """Write `{"tool_calls": [...]}`."""
    objects = [
        {
            **({"id": call.id} if call.id else {}),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    return as_json({"tool_calls": objects})


def python_call(call: CallToWrite) -> str:
    """Write `NAME(KEY=VALUE, ...)`."""
    arguments = ", ".join(f"{key}={_as_python(value)}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"


def coder_call(open_: str, close: str, call: CallToWrite) -> str:
    """Write Qwen3-Coder's tags."""
    parameters = "".join(
        f"<parameter={key}>\n{as_plain(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"{open_}\n<function={call.name}>\n{parameters}</function>\n{close}"


def glm_call(call: CallToWrite) -> str:
    """Write GLM's tags."""
    arguments = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{as_plain(value)}</arg_value>\n"
        for key, value in call.arguments.items()
    )
    return f"<tool_call>{call.name}\n{arguments}</tool_call>"


def gemma_call(open_: str, close: str, quote: str, call: CallToWrite) -> str:
    """Write Gemma's notation."""
    return f"{open_}call:{call.name}{_as_gemma(call.arguments, quote)}{close}"


def invocation(prefix: str) -> Callable[[CallToWrite], str]:
    """Return the writer of `invoke` tags; with a prefix, each value says whether it is text."""

    def write(call: CallToWrite) -> str:
        return (
            f'<{prefix}invoke name="{call.name}">\n'
            + "".join(parameter(key, value) for key, value in call.arguments.items())
            + f"</{prefix}invoke>"
        )

    def parameter(key: str, value: object) -> str:
        kind = f' string="{as_json(isinstance(value, str))}"' if prefix else ""
        return f'<{prefix}parameter name="{key}"{kind}>{as_plain(value)}</{prefix}parameter>\n'

    return write


def as_json(value: object) -> str:
    """Return a value as JSON with its characters unescaped, as models write it."""
    return json.dumps(value, ensure_ascii=False)


def as_plain(value: object) -> str:
    """Return a text as it is and any other value as JSON."""
    return value if isinstance(value, str) else as_json(value)


def _as_python(value: object) -> str:
    """Return a JSON value as a Python literal."""
    if isinstance(value, Mapping):
        items = (f"{as_json(key)}: {_as_python(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_python, value)) + "]"
    # JSON's strings are Python's; `repr` would escape characters that models write as they are.
    return as_json(value) if isinstance(value, str) else repr(value)


def _as_gemma(value: object, quote: str) -> str:
    if isinstance(value, Mapping):
        items = (
            f"{_gemma_key(key, quote)}:{_as_gemma(item, quote)}" for key, item in value.items()
        )
        return "{" + ",".join(items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_as_gemma(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else as_json(value)


def _gemma_key(key: str, quote: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else f"{quote}{key}{quote}"
