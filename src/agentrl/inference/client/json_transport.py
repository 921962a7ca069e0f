"""JSON over HTTP to one server, through one pool of connections.

Handles connections, timeouts and error bodies. Independent of routes and keys.
"""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import aiohttp
import orjson

from agentrl.errors import InferenceError, ServerLost, ServerRefused, ServerUnreachable

# Servers close idle connections after 5 s, and a request sent at that moment fails.
_KEEPALIVE_SECONDS = 3.0
_CONNECT_SECONDS = 5.0
CONTROL_SECONDS = 300.0
_KEEPALIVE_OPTIONS = {
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 40_000,
}
"""TCP keepalive: a silent connection is probed after 20 s, every 5 s, 4 times. `TCP_USER_TIMEOUT` is
the longest wait, in ms, for sent data to be acknowledged."""
_HEALTH_SECONDS = 30.0
_JSON_HEADERS = {"Content-Type": "application/json"}
_MAX_REPLY_BYTES = 128 << 20
"""Largest body or stream frame: a million tokens with their logprobs and experts."""
_MAX_ERROR_BYTES = 1 << 20


class JsonTransport:
    """Requests to one server. Every failure is an `InferenceError` that names the address."""

    def __init__(self, base_url: str) -> None:
        """Prepare a transport, inside a running event loop."""
        self.base_url = base_url.rstrip("/")
        # httpx is too slow, because its pool scans every connection for every request. With 64
        # concurrent generations, this took more processor time than the rest of the rollouts.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEPALIVE_SECONDS,
                socket_factory=_keepalive_socket,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Compression is off, because the size limit counts bytes as they arrive.
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def status(self, path: str) -> int | None:
        """Return the status of a GET without a key; None without a response."""
        timeout = aiohttp.ClientTimeout(_HEALTH_SECONDS)
        try:
            async with self._http.get(
                self.base_url + path, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def get(self, path: str, headers: dict[str, str]) -> dict[str, Any]:
        """Return the JSON object that a GET returns."""
        async with self.response("GET", path, None, headers=headers) as response:
            return self.decode(await self.content(response))

    async def post(self, path: str, body: Mapping[str, Any], headers: dict[str, str]) -> None:
        """Send a POST; only the status of its response matters."""
        async with self.response("POST", path, body, headers=headers) as response:
            await self.content(response)

    @asynccontextmanager
    async def response(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        headers: dict[str, str],
        timeout_seconds: float | None = CONTROL_SECONDS,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a successful response with its body unread."""
        url = self.base_url + path
        try:
            async with self._http.request(
                method,
                url,
                # aiohttp sends a file in chunks and lets other tasks run in between.
                data=None if body is None else BytesIO(_encoded(body, url)),
                headers=headers | _JSON_HEADERS if body is not None else headers,
                timeout=aiohttp.ClientTimeout(timeout_seconds, sock_connect=_CONNECT_SECONDS),
                # Another host would receive prompts and, where only the path differs, keys.
                allow_redirects=False,
            ) as response:
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding != "identity":
                    raise InferenceError(f"{url} sent a compressed body ({encoding})")
                if response.status >= 300:
                    content = await self.content(response, max_bytes=_MAX_ERROR_BYTES)
                    text = _error_text(content, response.reason)
                    raise ServerRefused(
                        f"{url} answered {response.status}: {text}", response.status
                    )
                yield response
        except TimeoutError as error:
            raise ServerUnreachable(f"{url} timed out ({type(error).__name__})") from error
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(url, error) from error
        except (
            aiohttp.ServerDisconnectedError,
            aiohttp.ClientPayloadError,
            aiohttp.ClientOSError,
            ConnectionResetError,
        ) as error:
            raise ServerLost(f"{url} closed the connection ({type(error).__name__})") from error
        except aiohttp.ClientError as error:
            raise _unreachable(url, error) from error

    async def content(
        self, response: aiohttp.ClientResponse, max_bytes: int | None = None
    ) -> bytes:
        """Return the body of a response."""
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            self._check_size(len(body), max_bytes or _MAX_REPLY_BYTES)
        return bytes(body)

    async def frames(self, response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of server-sent events up to `[DONE]`."""
        buffer, searched = bytearray(), 0
        # Lines are not used, because aiohttp limits their length and a frame holds all tokens so
        # far.
        async for chunk in response.content.iter_any():
            buffer += chunk
            while (end := buffer.find(b"\n\n", searched)) >= 0:
                data = bytes(buffer[:end]).removeprefix(b"data:").strip()
                del buffer[: end + 2]
                searched = 0
                if data == b"[DONE]":
                    return
                yield self.decode(data)
            self._check_size(len(buffer), _MAX_REPLY_BYTES)
            searched = max(0, len(buffer) - 1)

    def decode(self, content: bytes) -> dict[str, Any]:
        """Return a decoded JSON object."""
        try:
            body = orjson.loads(content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise InferenceError(f"{self.base_url} sent a body that is not a JSON object")
        return body

    def _check_size(self, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            raise InferenceError(f"{self.base_url} sent more than {max_bytes >> 20} MiB")


def error_message(body: object) -> str:
    """Return the message of an error body in any of the shapes that SGLang sends.

    The shapes are `{"error": {"message": ..}}`, `{"error": ".."}`, `{"message": ..}` (with
    `object: error`, or `success: false`), `{"error_message": ..}` of the adapters' routes and the
    framework's `{"detail": ..}`.
    """
    if not isinstance(body, Mapping):
        return str(body).strip()[:500]
    fields: Mapping[str, Any] = body
    error = fields.get("error")
    if isinstance(error, Mapping):
        return str(error.get("message", error))
    for value in (error, *(fields.get(n) for n in ("message", "error_message", "detail"))):
        if value:
            return str(value)
    return str(dict(fields))[:500]


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose connection fails when its peer has vanished.

    A generation may take arbitrarily long, so the wait for its response has no timeout. A machine
    that lost power or network does not close its connections; only the kernel's probes notice.
    """
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE_OPTIONS.items():
        if hasattr(socket, option):  # these options differ between systems
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


def _unreachable(url: str, error: aiohttp.ClientError) -> ServerUnreachable:
    return ServerUnreachable(
        f"{url} cannot be reached ({type(error).__name__}); check that the server is running there"
    )


def _error_text(content: bytes, reason: str | None) -> str:
    try:
        body = orjson.loads(content)
    except ValueError:
        body = content.decode(errors="replace") or reason
    return " ".join(error_message(body).split())


def _encoded(body: Mapping[str, Any], url: str) -> bytes:
    # The standard library's JSON takes about 100 times as long. The ids of a long prompt would
    # block all other rollouts of this event loop for milliseconds.
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise InferenceError(
            f"cannot send the request to {url}: it is not valid JSON ({error})"
        ) from error
