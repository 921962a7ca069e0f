"""Reads bodies of untrusted HTTP requests within limits.

Bytes are counted before parsing, and nesting before anything traverses the result. Out: a JSON
object whose texts can be encoded and whose numbers are finite.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request

from agentrl.errors import APIError

MAX_NESTING = 100
"""Levels of arrays and objects. Much Python code traverses such values recursively."""
HALF_CHARACTER = "half_character"
"""Error code for malformed text that the policy may have written, in the arguments of a call."""
_BODY_SECONDS = 60.0
_MAX_OBJECTS = 200_000
_MAX_VALUES = 4_000_000
"""Token ids of a prompt are values. A parser blocks the event loop until it is done."""
_HALF = (
    "the body holds half of a character (a lone \\ud800 to \\udfff), which is not text; remove it"
)


async def read_json_object(http: Request, max_bytes: int) -> Mapping[str, Any]:
    """Return the JSON object that a request carries.

    Raises:
        APIError: it carries anything else, is too large, or arrives too slowly.
    """
    raw = await _read(http, max_bytes)
    num_objects = raw.count(b"{")
    if num_objects > _MAX_OBJECTS or num_objects + raw.count(b",") + raw.count(b"[") > _MAX_VALUES:
        raise APIError(
            f"the body holds more than {_MAX_OBJECTS} braces or {_MAX_VALUES} values", status=413
        )
    try:
        # Unlike the standard library's, this parser refuses NaN, 1e999 and half characters.
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "surrogate" in str(error):
            raise APIError(_HALF, code=HALF_CHARACTER) from None
        raise APIError(f"the body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise APIError("the body must be a JSON object")
    is_flat = raw.count(b"[") + raw.count(b"{") <= MAX_NESTING
    if not is_flat and nests_deeper(body, MAX_NESTING):
        raise APIError(f"the body nests deeper than {MAX_NESTING} levels")
    return body


def nests_deeper(value: Any, most: int) -> bool:
    """Return whether arrays and objects nest more than `most` levels deep."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(most):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in (dict, list)
        ]
        if not level:
            return False
    return True


async def _read(http: Request, max_bytes: int) -> bytearray:
    kept, size = bytearray(), 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in http.stream():
                size += len(chunk)
                # The rest is read and dropped: a client reads no answer while it is still sending.
                if size <= max_bytes:
                    kept += chunk
    except TimeoutError:
        raise APIError(f"the body did not arrive within {_BODY_SECONDS:g} s", status=408) from None
    if size > max_bytes:
        raise APIError(f"the body has {size} bytes; at most {max_bytes} are accepted", status=413)
    return kept
