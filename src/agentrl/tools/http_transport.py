"""HTTP for the MCP SDK that tells apart how a request failed.

The SDK's streamable HTTP client ends the whole connection, with every call in flight on it, when
one POST fails, and it hides the status of error responses. This transport answers a failed POST
with a JSON-RPC error of its own, so that only that call fails, and says in the error's `data`
whether the request can have been carried out.
"""

import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final, Literal

import httpx2

FAILURE_KEY: Final = "agentrl_failure"
Failure = Literal["not_sent", "lost", "refused", "session_ended"]
"""`not_sent`: it never reached the server. `lost`: it was sent, its answer was not received.
`refused`: the server turned the connection down (authorization, address). `session_ended`: the
server does not know the session any more, and did nothing."""

_INTERNAL_ERROR = -32603
_SESSION_HEADER = "mcp-session-id"
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
# Answers with which a server or proxy says that it did not take the request up.
_STATUS_NOT_SENT = (429, 503)
_STATUS_LOST = (500, 502, 504)


class FailureReportingTransport(httpx2.AsyncBaseTransport):
    """Turns failures of POST requests into JSON-RPC error responses.

    It keeps one connection a request in flight and uses the one that was freed last first. (An
    ordinary pool looks at every connection it has for every request, which costs more than the
    request itself once a hundred rollouts share the pool.)
    """

    def __init__(self) -> None:
        self._ssl_context = httpx2.create_ssl_context()
        self._free: list[httpx2.AsyncHTTPTransport] = []
        self._all: list[httpx2.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a POST that fails is answered by a JSON-RPC error."""
        connection = self._take()
        try:
            response = await connection.handle_async_request(request)
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            if request.method != "POST" or _is_event_stream(response):
                response.stream = _Stream(response.stream, partial(self._free.append, connection))
                return response
            await response.aread()
        except BaseException as error:
            self._free.append(connection)
            if request.method != "POST" or not isinstance(error, httpx2.TransportError):
                raise
            failure: Failure = "not_sent" if isinstance(error, _NEVER_SENT) else "lost"
            return _failure(request, failure, f"{type(error).__name__}: {error}".rstrip(": "))
        self._free.append(connection)
        return _explained(request, response)

    async def aclose(self) -> None:
        """Close all connections."""
        for connection in self._all:
            await connection.aclose()

    def _take(self) -> httpx2.AsyncHTTPTransport:
        if self._free:
            return self._free.pop()
        one = httpx2.Limits(max_connections=1, max_keepalive_connections=1)
        connection = httpx2.AsyncHTTPTransport(verify=self._ssl_context, limits=one)
        self._all.append(connection)
        return connection


class _Stream(httpx2.AsyncByteStream):
    """A stream whose breaking is its end: the SDK then fails the one call that it carried."""

    def __init__(self, stream: httpx2.AsyncByteStream, release: Callable[[], None]) -> None:
        self._stream = stream
        self._release: Callable[[], None] | None = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                yield chunk
        except httpx2.TransportError:
            return

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            release, self._release = self._release, None
            if release is not None:
                release()


def _explained(request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
    """Return the response, or a JSON-RPC error that says what its status means."""
    status = response.status_code
    if status < 400:
        return response
    if status == 404:
        # Without a session it is the SDK's business: it may mean an older protocol.
        if _SESSION_HEADER in request.headers:
            return _failure(request, "session_ended", "the session has ended")
        return response
    if _is_jsonrpc(response):
        return response
    return _failure(request, _status_failure(status), f"HTTP {status}")


def _is_event_stream(response: httpx2.Response) -> bool:
    kind = response.headers.get("content-type", "")
    return response.status_code < 400 and kind.lower().startswith("text/event-stream")


def _is_jsonrpc(response: httpx2.Response) -> bool:
    try:
        body = json.loads(response.content)
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("jsonrpc") == "2.0"


def _status_failure(status: int) -> Failure:
    if status in _STATUS_NOT_SENT:
        return "not_sent"
    return "lost" if status in _STATUS_LOST else "refused"


def _failure(request: httpx2.Request, failure: Failure, message: str) -> httpx2.Response:
    error = {"code": _INTERNAL_ERROR, "message": message, "data": {FAILURE_KEY: failure}}
    body = {"jsonrpc": "2.0", "id": None, "error": error}
    return httpx2.Response(400, json=body, request=request)
