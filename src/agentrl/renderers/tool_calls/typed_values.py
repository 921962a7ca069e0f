"""Values that a format writes as plain text: the tool's schema determines their types."""

import json
from collections.abc import Mapping
from typing import Any

from agentrl.renderers.tool_calls.call_format import FormatError, Tools, decode_json

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


class Parameters:
    """The parameters of one tool; none for an unknown tool."""

    def __init__(self, name: str, tools: Tools) -> None:
        """Look the tool up."""
        self._name = name
        functions = (tool.get("function", tool) for tool in tools)
        schema = next((f.get("parameters") for f in functions if f.get("name") == name), None)
        self._schema: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}

    def value(self, key: str, raw: str) -> object:
        """Return the value that a parameter's text represents.

        Raises:
            FormatError: it represents none of the types that the schema admits.
        """
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        kinds = self._kinds(schema, _MAX_REFERENCES)
        if not kinds or kinds == {"string"}:
            return raw
        value = _as_json(raw.strip())
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
        return {_KIND_NAMES[json.dumps(value)[0]] for value in values} if values else set()

    def _resolve(self, reference: object) -> object:
        """Return the part of the schema that a JSON pointer like `#/$defs/Color` refers to."""
        found: object = self._schema
        path = reference.removeprefix("#").split("/")[1:] if isinstance(reference, str) else []
        for step in path:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if path else None


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
