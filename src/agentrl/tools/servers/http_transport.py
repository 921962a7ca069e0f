"""HTTP transport for the MCP SDK that distinguishes how a request failed.

The SDK's streamable HTTP client ends the whole connection, with every call in flight on it, when
one POST fails, and it hides the status of error responses. This transport turns a failed POST into
a JSON-RPC error response, so that only that call fails, and the error's `data` states whether the
server may have processed the request.
"""

import json
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any, Literal

import aiohttp
import httpx2
from yarl import URL

from agentrl.runtime.http.bounded_replies import density, num_marks
from agentrl.tools.servers.admission import (
    FAILURE_KEY,
    MAX_MESSAGE_BYTES,
    STATUS_LOST,
    STATUS_NOT_SENT,
    describe,
)

Failure = Literal["not_sent", "lost", "refused", "session_ended", "too_large"]
"""`not_sent`: it never reached the server. `lost`: it was sent, but no response was received.
`refused`: the server rejected the connection (authorization, address). `session_ended`: the server
no longer has the session, and did nothing. `too_large`: the response is more than
`admission` accepts."""

_INTERNAL_ERROR = -32603
_SESSION_HEADER = "mcp-session-id"
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# Servers close idle connections after 5 s; reusing one at that moment fails.
_KEEPALIVE_SECONDS = 3.0
_ACCEPTED = 202
_EVENT_ENDS = (b"\n\n", b"\r\r", b"\r\n\r\n")
_MAX_END_BYTES = 3  # but for the last byte


class FailureReportingTransport(httpx2.AsyncBaseTransport):
    """Turns failures of POST requests into JSON-RPC error responses.

    The requests are sent by aiohttp: the pool of httpx scans all of its connections for every
    request and writes each request in several pieces. With aiohttp, a call of a trivial tool takes a
    quarter less processor time.
    """

    def __init__(self) -> None:
        """Prepare, inside a running event loop."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, ssl=httpx2.create_ssl_context()
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            auto_decompress=False,
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a POST that fails becomes a JSON-RPC error response."""
        try:
            reply = await self._send(request)
            if (encoding := reply.headers.get("content-encoding", "identity")) != "identity":
                reply.close()
                reason = f"the response is compressed ({encoding})"
                if request.method != "POST":
                    raise httpx2.ReadError(reason, request=request)
                return _failure(request, "too_large", reason)
            if request.method != "POST" or _is_event_stream(reply):
                return _response(request, reply, stream=_Stream(request, reply))
            content = await _read_body(reply)
        except _NEVER_SENT as error:
            # aiohttp's own text mentions TLS whether or not it is in use.
            reason = describe(error.__cause__ or error)
            if request.method != "POST":
                raise httpx2.ConnectError(reason, request=request) from error
            return _failure(request, "not_sent", reason)
        except aiohttp.ClientError as error:
            if request.method != "POST":
                raise httpx2.ReadError(describe(error), request=request) from error
            return _failure(request, "lost", describe(error))
        if content is None:
            size = f"{MAX_MESSAGE_BYTES >> 20} MiB"
            return _failure(request, "too_large", f"the response is longer than {size}")
        if (excess := density(num_marks(content))) is not None:
            return _failure(request, "too_large", excess)
        return _with_explained_status(request, _response(request, reply, content=content))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def _send(self, request: httpx2.Request) -> aiohttp.ClientResponse:
        body = await request.aread()
        limits = request.extensions["timeout"]
        return await self._http.request(
            request.method,
            URL(str(request.url), encoded=True),
            headers=request.headers.multi_items(),
            # aiohttp sends a file in chunks and yields to other tasks between them.
            data=BytesIO(body) if body else None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(sock_connect=limits["connect"], sock_read=limits["read"]),
        )


class _Stream(httpx2.AsyncByteStream):
    """An event stream that ends when its connection breaks, so that the SDK fails only that call.

    It also ends at an event that exceeds the parsing limits, with an error for the call.
    """

    def __init__(self, request: httpx2.Request, reply: aiohttp.ClientResponse) -> None:
        self._request = request
        self._reply = reply

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_before, last = 0, b""
        try:
            async for chunk in self._reply.content.iter_any():
                if (reason := density(num_before + num_marks(chunk))) is not None:
                    yield _error_event(self._request, reason)
                    return
                last = last[-_MAX_END_BYTES:] + chunk  # an end may be cut in two
                end = max(map(last.rfind, _EVENT_ENDS))
                num_before = num_marks(last[end:]) if end >= 0 else num_before + num_marks(chunk)
                yield chunk
        except aiohttp.ClientError:
            return

    async def aclose(self) -> None:
        self._reply.close()


async def _read_body(reply: aiohttp.ClientResponse) -> bytes | None:
    """Return the body of a response, or None when it is too long."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in reply.content.iter_any():
            size += len(chunk)
            if size > MAX_MESSAGE_BYTES:
                return None
            chunks.append(chunk)
    finally:
        reply.close()  # has no effect after the body was read completely
    return b"".join(chunks)


def _response(
    request: httpx2.Request, reply: aiohttp.ClientResponse, **body: Any
) -> httpx2.Response:
    return httpx2.Response(reply.status, headers=reply.raw_headers, request=request, **body)


def _with_explained_status(request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
    """Return the response, or a JSON-RPC error that explains its status."""
    status = response.status_code
    if status < 300 and status != _ACCEPTED and response.content and not _is_json(response):
        kind = response.headers.get("content-type", "no type")
        return _failure(request, "lost", f"answered with {kind}, which is not MCP")
    if status < 400:
        return response
    if status == 404:
        # Without a session, the SDK decides: the status may indicate an older protocol.
        if _SESSION_HEADER in request.headers:
            return _failure(request, "session_ended", "the session has ended")
        return response
    if _is_jsonrpc(response):
        return response
    return _failure(request, _status_failure(status), f"HTTP {status}")


def _is_event_stream(reply: aiohttp.ClientResponse) -> bool:
    return reply.status < 400 and reply.content_type == "text/event-stream"


def _is_json(response: httpx2.Response) -> bool:
    return bool(response.headers.get("content-type", "").startswith("application/json"))


def _is_jsonrpc(response: httpx2.Response) -> bool:
    try:
        body = json.loads(response.content)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("jsonrpc") == "2.0"


def _status_failure(status: int) -> Failure:
    if status in STATUS_NOT_SENT:
        return "not_sent"
    return "lost" if status in STATUS_LOST else "refused"


def _failure(request: httpx2.Request, failure: Failure, message: str) -> httpx2.Response:
    return httpx2.Response(400, json=_error(None, failure, message), request=request)


def _error_event(request: httpx2.Request, message: str) -> bytes:
    """Return the event that fails the call of a POST; a GET has no call."""
    if request.method != "POST":
        return b""
    error = _error(json.loads(request.content).get("id"), "too_large", message)
    # The first line gives the begun event another type, so the SDK skips it.
    return f"\nevent: refused\n\nevent: message\ndata: {json.dumps(error)}\n\n".encode()


def _error(id_: object, failure: Failure, message: str) -> dict[str, Any]:
    error = {"code": _INTERNAL_ERROR, "message": message, "data": {FAILURE_KEY: failure}}
    return {"jsonrpc": "2.0", "id": id_, "error": error}
