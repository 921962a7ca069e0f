"""Requests that fit a server's own OpenAPI description, and requests that just do not."""

import json
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from starlette.applications import Starlette

from agentrl.inference.openapi import PATH

_MAX_ITEMS = 50


def bodies(app: Starlette, path: str) -> st.SearchStrategy[Any]:
    """Bodies of a POST: JSON values, bytes that are none, and what is no body at all.

    None exceeds a length of thousands: drawing one takes minutes.
    """
    described = schemathesis.openapi.from_asgi(PATH, app, headers={"Host": "127.0.0.1"})
    operation = schemathesis.openapi.from_dict(_without_long(described.raw_schema))[path]["POST"]
    of_modes = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)
    return st.one_of(*of_modes).map(lambda case: case.body)


def _without_long(schema: Any) -> Any:
    """Return a schema without the upper bounds of long lists and texts."""
    if isinstance(schema, list):
        return [_without_long(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_long(part)
        for name, part in schema.items()
        if name not in ("maxItems", "maxLength") or part <= _MAX_ITEMS
    }


def encoded(body: object) -> bytes:
    """Write JSON and what Python adds to it: NaN, infinities, halves of characters."""
    if isinstance(body, bytes):
        return body
    try:
        return json.dumps(body).encode()
    except TypeError:
        return b""
