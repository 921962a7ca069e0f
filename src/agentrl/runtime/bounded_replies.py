"""Replies of HTTP servers that are not ours, read within bounds.

Input: a client of httpx and a request. Output: a status and JSON, or the one line that says why a
reply is refused. The bytes are counted as they arrive, so none may be compressed; the time counts
the whole exchange, not the silence in it. What the text can hold is counted before it is parsed: a
parser keeps the event loop until it is done.
"""

import asyncio
from typing import Any

import httpx
import orjson

from agentrl.errors import UnreadableReply

NOT_COMPRESSED = {"Accept-Encoding": "identity"}
"""Headers of a client for `read_reply`."""
MAX_MARKS = 300_000
"""Commas and opening brackets of a JSON text: a parser takes a tenth of a second for so many values."""


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

    Args:
        client: whose headers ask for no compression; see `NOT_COMPRESSED`.
        method: such as `POST`.
        url: the address.
        max_bytes: the longest body.
        seconds: for the whole exchange; None: as long as it takes.
        **request: as `httpx.AsyncClient.stream` takes it.

    Raises:
        UnreadableReply: the body is compressed, or longer.
        TimeoutError: it did not end in time.
        httpx.HTTPError: the exchange failed.
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
    """Say why a JSON text of so many marks is not parsed, or return None."""
    if num_marks > MAX_MARKS:
        return f"the response contains more than {MAX_MARKS} commas and brackets"
    return None


def json_of(text: bytes) -> Any:
    """Return what a reply says.

    Raises:
        UnreadableReply: it is no JSON, nests hundreds of levels deep, or holds too much.
    """
    if (reason := density(num_marks(text))) is not None:
        raise UnreadableReply(reason)
    try:
        return orjson.loads(text)
    except ValueError as error:
        raise UnreadableReply(f"the response is not JSON: {error}") from None
