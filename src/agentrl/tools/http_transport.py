"""HTTP for the MCP SDK that tells apart how a request failed.

The SDK's streamable HTTP client ends the whole connection, with every call in flight on it, when
one POST fails, and it hides the status of error responses. This transport answers a failed POST
with a JSON-RPC error of its own, so that only that call fails, and says in the error's `data`
whether the request can have been carried out.
"""

import json
from collections.abc import AsyncIterator
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


class FailureReportingTransport(httpx2.AsyncHTTPTransport):
    """Turns failures of POST requests into JSON-RPC error responses."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a POST that fails is answered by a JSON-RPC error."""
        if request.method != "POST":
            return await super().handle_async_request(request)
        try:
            response = await super().handle_async_request(request)
            if _is_event_stream(response):
                assert isinstance(response.stream, httpx2.AsyncByteStream)
                response.stream = _EndingStream(response.stream)
                return response
            await response.aread()
        except _NEVER_SENT as error:
            return _failure(request, "not_sent", _say(error))
        except httpx2.TransportError as error:
            return _failure(request, "lost", _say(error))
        if response.status_code < 400:
            return response
        if response.status_code == 404:
            # Without a session it is the SDK's business: it may mean an older protocol.
            if _SESSION_HEADER in request.headers:
                return _failure(request, "session_ended", "the session has ended")
            return response
        if _is_jsonrpc(response):
            return response
        status = response.status_code
        return _failure(request, _status_failure(status), f"HTTP {status}")


class _EndingStream(httpx2.AsyncByteStream):
    """An event stream whose breaking is its end: the SDK then fails the one call it carried."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                yield chunk
        except httpx2.TransportError:
            return

    async def aclose(self) -> None:
        await self._stream.aclose()


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


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _failure(request: httpx2.Request, failure: Failure, message: str) -> httpx2.Response:
    error = {"code": _INTERNAL_ERROR, "message": message, "data": {FAILURE_KEY: failure}}
    body = {"jsonrpc": "2.0", "id": None, "error": error}
    return httpx2.Response(400, json=body, request=request)
