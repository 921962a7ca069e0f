"""Reads replies of third-party HTTP servers within limits.

Input: a client of httpx and a request. Output: a status and JSON, or one line with the reason for
rejecting the reply. Bytes are counted as they arrive, so compression is not accepted; the timeout
limits the whole exchange, not its pauses. The number of values is limited before parsing, because a
parser blocks the event loop until it is done.
"""

import asyncio
from typing import Any

import httpx
import orjson

from agentrl.errors import UnreadableReply

NOT_COMPRESSED = {"Accept-Encoding": "identity"}
"""Headers of a client for `read_reply`."""
MAX_MARKS = 300_000
"""Limit on commas and opening brackets of a JSON text; parsing so many values takes 0.1 s."""


async def read_reply(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    max_bytes: int,
    seconds: float | None,
    **request: Any,
) -> tuple[int, bytes]:
    """Send a request and return the status and the body of its reply.

    The client's headers refuse compression (`NOT_COMPRESSED`); `seconds` limits the whole exchange.
    """
    body = bytearray()
    async with asyncio.timeout(seconds), client.stream(method, url, **request) as response:
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise UnreadableReply(f"the response is compressed ({encoding})")
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > max_bytes:
                raise UnreadableReply(f"the response is longer than {max_bytes >> 20} MiB")
    return response.status_code, bytes(body)


def num_marks(text: bytes) -> int:
    """Return how many commas and opening brackets a text holds."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def density(num_marks: int) -> str | None:
    """Return why a JSON text with this many marks is not parsed, or None."""
    if num_marks > MAX_MARKS:
        return f"the response contains more than {MAX_MARKS} commas and brackets"
    return None


def json_of(text: bytes) -> Any:
    """Return the content of a reply."""
    if (reason := density(num_marks(text))) is not None:
        raise UnreadableReply(reason)
    try:
        return orjson.loads(text)
    except ValueError as error:
        raise UnreadableReply(f"the response is not JSON: {error}") from None
