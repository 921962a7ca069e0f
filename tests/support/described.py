"""Requests that fit a server's own OpenAPI description, and requests that just do not."""

import json
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from starlette.applications import Starlette

from agentrl.inference.openapi import PATH


def bodies(app: Starlette, path: str) -> st.SearchStrategy[Any]:
    """Bodies of a POST: JSON values, bytes that are none, and what is no body at all."""
    operation = schemathesis.openapi.from_asgi(PATH, app, headers={"Host": "127.0.0.1"})[path][
        "POST"
    ]
    of_modes = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)
    return st.one_of(*of_modes).map(lambda case: case.body)


def encoded(body: object) -> bytes:
    """Write JSON and what Python adds to it: NaN, infinities, halves of characters."""
    if isinstance(body, bytes):
        return body
    try:
        return json.dumps(body).encode()
    except TypeError:
        return b""
