"""Reads bodies of untrusted HTTP requests within limits, and notices clients that leave.

Bytes are counted before parsing, and nesting before anything traverses the result. Output: a JSON
object whose texts can be encoded and whose numbers are finite.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request

from agentrl.errors import APIError

_T = TypeVar("_T")

MAX_NESTING = 100
"""Levels of arrays and objects. Limited because much Python code traverses them recursively."""
UNPAIRED_SURROGATE = "unpaired_surrogate"
"""Error code for an unpaired surrogate, which the policy may have written in a call's arguments."""
_BODY_TIMEOUT_SECONDS = 60.0
_MAX_OBJECTS = 200_000
_MAX_VALUES = 4_000_000
"""Every token id of a prompt is a value. Limited because parsing blocks the event loop."""
_SURROGATE_MESSAGE = (
    "the body contains an unpaired surrogate (\\ud800 to \\udfff), which is not valid text; "
    "remove it"
)


async def read_json_object(http: Request, max_bytes: int) -> Mapping[str, Any]:
    """Return the JSON object that a request carries."""
    raw = await _read(http, max_bytes)
    num_objects = raw.count(b"{")
    if num_objects > _MAX_OBJECTS or num_objects + raw.count(b",") + raw.count(b"[") > _MAX_VALUES:
        raise APIError(
            f"the body holds more than {_MAX_OBJECTS} objects or {_MAX_VALUES} values", status=413
        )
    try:
        # Unlike the standard library's parser, this one rejects NaN, 1e999 and unpaired surrogates.
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "surrogate" in str(error):
            raise APIError(_SURROGATE_MESSAGE, code=UNPAIRED_SURROGATE) from None
        raise APIError(f"the body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise APIError("the body must be a JSON object")
    is_flat = raw.count(b"[") + raw.count(b"{") <= MAX_NESTING
    if not is_flat and nests_deeper(body, MAX_NESTING):
        raise APIError(f"the body nests deeper than {MAX_NESTING} levels")
    return body


def nests_deeper(value: Any, max_levels: int) -> bool:
    """Return whether arrays and objects nest more than `most` levels deep."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(max_levels):
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
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_SECONDS):
            async for chunk in http.stream():
                size += len(chunk)
                # Excess bytes are read and discarded, because a client that is still sending does
                # not read the response.
                if size <= max_bytes:
                    body += chunk
    except TimeoutError:
        raise APIError(
            f"the body did not arrive within {_BODY_TIMEOUT_SECONDS:g} s", status=408
        ) from None
    if size > max_bytes:
        raise APIError(f"the body has {size} bytes; at most {max_bytes} are accepted", status=413)
    return body


async def while_connected(http: Request, work: Awaitable[_T]) -> _T:
    """Await a result; cancel the work if the client disconnects first."""
    task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait({task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "the client disconnected")
        return task.result()
    finally:
        disconnect_task.cancel()
        task.cancel()


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
