"""Values that a format writes as plain text: the tool's schema determines their types."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from agentrl.renderers.tool_calls.call_format import (
    SHOWN_CHARS,
    FormatError,
    Tools,
    decode_json,
    is_name,
    schemas_of,
    skip_space,
)

_MAX_REFERENCES = 16
_KIND_NAMES = {
    **dict.fromkeys("-0123456789", "number"),
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
    "[": "array",
    "{": "object",
}


class ArgumentTags(NamedTuple):
    """How a format marks the arguments of a call."""

    open: re.Pattern[str]
    """The tag in front of a value; its groups are the key and, where formats say so, whether the
    value is text (`true` or `false`).
    """
    close: str
    """The tag behind a value."""
    end: re.Pattern[str]
    """The end of a value: `close`, in front of what may follow it."""
    next: re.Pattern[str]
    """The beginning of another argument, whichever its key; a text seldom holds it without an end."""


class Parameters:
    """The parameters of one tool; none for an unknown tool."""

    def __init__(self, name: str, tools: Tools) -> None:
        """Look the tool up."""
        self._name = name
        self._schemas = schemas_of(tools)
        self._schema = self._schemas.get(name, {})

    def read(
        self, text: str, start: int, tags: ArgumentTags, given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """Return the arguments from `start` on, with those already given, and where they end."""
        arguments, position = dict(given), skip_space(text, start)
        while (tag := tags.open.match(text, position)) is not None:
            key = self._key(tag[1])
            end = tags.end.search(text, tag.end())
            if end is None or self._holds_another(text[tag.end() : end.start()], tags):
                raise FormatError(f"parameter {key!r} has no end", self._name)
            if key in arguments:
                raise FormatError(f"parameter {key!r} is given twice", self._name)
            raw = text[tag.end() : end.start()]
            arguments[key] = self._value(key, raw, *tag.groups()[1:])
            position = skip_space(text, end.end())
        return arguments, position

    def allows_null(self, key: str) -> bool:
        """Return whether null is a value of a parameter."""
        return "null" in self._kinds(_properties(self._schema).get(key), _MAX_REFERENCES)

    def _key(self, written: str) -> str:
        key = written.strip()
        if not is_name(key) and key not in _properties(self._schema):
            raise FormatError(f"{key[:SHOWN_CHARS]!r} is not the name of a parameter", self._name)
        return key

    def _holds_another(self, raw: str, tags: ArgumentTags) -> bool:
        """Return whether a value includes another argument, because its own end is missing.

        A value may hold tags, as code about them does; but there, each has its end.
        """
        closed = raw.rfind(tags.close)
        rest = raw if closed < 0 else raw[closed + len(tags.close) :]
        if tags.next.search(rest):
            return True
        keys = {tag[1].strip() for tag in tags.open.finditer(rest)}
        return any(keys & _properties(schema).keys() for schema in self._schemas.values())

    def _value(self, key: str, raw: str, is_text: str | None = None) -> object:
        """Return the value that a parameter's text represents."""
        if is_text == "true":
            return raw
        if is_text == "false":
            value, end = decode_json(raw.strip(), 0)
            if end != len(raw.strip()):
                raise FormatError(f"parameter {key!r} is not one JSON value", self._name)
            return value
        kinds = self._kinds(_properties(self._schema).get(key), _MAX_REFERENCES)
        if kinds == {"string"}:
            return raw
        value = _as_json(raw.strip())
        if not kinds:
            return value if isinstance(value, dict | list) else raw
        if isinstance(value, float) and "number" not in kinds and value.is_integer():
            value = int(value)
        if _is_of_kind(value, kinds):
            return value
        if "string" in kinds:
            return raw
        types = ", ".join(sorted(kinds))
        raise FormatError(f"parameter {key!r}: {raw[:80]!r} is not of type {types}", self._name)

    def _kinds(self, schema: object, depth: int) -> set[str]:
        """Return the JSON types that a schema admits; empty if it specifies none."""
        if not isinstance(schema, Mapping) or depth == 0:
            return set()
        kind = schema.get("type")
        if isinstance(kind, str):
            return {kind}
        if isinstance(kind, list):
            return {str(name) for name in kind}
        if "$ref" in schema:
            return self._kinds(self._resolve(schema["$ref"]), depth - 1)
        parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
        if parts:
            return set().union(*(self._kinds(part, depth - 1) for part in parts))
        values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        if values:
            return {_KIND_NAMES[json.dumps(value)[0]] for value in values}
        implied = {"properties": "object", "items": "array"}
        return {kind for key, kind in implied.items() if isinstance(schema.get(key), Mapping)}

    def _resolve(self, reference: object) -> object:
        """Return the part of the schema that a JSON pointer like `#/$defs/Color` refers to."""
        found: object = self._schema
        path = reference.removeprefix("#").split("/")[1:] if isinstance(reference, str) else []
        for step in path:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if path else None


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _as_json(text: str) -> object:
    """Return a text parsed as JSON; Python's literals are accepted too."""
    words: dict[str, object] = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value, end = decode_json(text, 0)
    except FormatError:
        return text
    return value if end == len(text) else text


def _is_of_kind(value: object, kinds: set[str]) -> bool:
    if value is None:
        return "null" in kinds
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, float):
        return "number" in kinds
    if isinstance(value, int):
        return bool(kinds & {"number", "integer"})
    # The text did not parse as any of the schema's other types.
    return (isinstance(value, list) and "array" in kinds) or (
        isinstance(value, dict) and "object" in kinds
    )
