"""Guard of every HTTP server of AgentRL that rejects requests sent by web pages.

A web page open on this machine can send requests to loopback, and by DNS rebinding it can reach a
server under the page's own name. Input: an ASGI application. Output: an application that answers
such requests itself. The servers check keys themselves.
"""

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agentrl.addresses import host_name, is_loopback

logger = logging.getLogger(__name__)

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]
_FOREIGN_SITES = ("cross-site", "same-site")


class HttpGuard:
    """ASGI middleware that checks `Host`, `Origin` and the type of a body."""

    def __init__(self, app: _App, host: str) -> None:
        """Wrap an application."""
        self._app = app
        self._is_local = is_loopback(host)
        if not self._is_local:
            logger.warning(
                "listening on %s over plain HTTP: keys and texts cross the network unencrypted; "
                "use a TLS proxy unless you trust the network",
                host,
            )

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Pass a request on, or refuse it."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, text = refusal
        logger.warning("refused %s %r: %s", scope["method"], scope["path"][:200], text)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": text}).encode()})

    def _refusal(self, scope: _Message) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        # A request may name several hosts, and servers differ in which one they use.
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if self._is_local and not all(is_loopback(host_name(one)) for one in hosts if one):
            return 421, "the Host header does not match this server; use 127.0.0.1 or localhost"
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "requests from other origins are refused"
        if headers.get(b"sec-fetch-site") in _FOREIGN_SITES:
            return 403, "requests from other sites are refused"
        has_body = headers.get(b"content-length", "0") != "0" or b"transfer-encoding" in headers
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if has_body and kind != "application/json" and not kind.endswith("+json"):
            return 415, "the body must be JSON, with Content-Type: application/json"
        return None
