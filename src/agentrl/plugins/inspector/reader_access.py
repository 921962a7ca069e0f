"""Access control: a token for every request, and security headers on every response.

Loopback is open to every user of the machine but a run's texts are not, so the token is required
there too, for all data. It arrives in the printed address, which leads to the page with a key of this
process, or as a bearer token. The page keeps the key where no other port reads it, unlike a cookie,
and whoever takes this port after a restart can do nothing with it. The code of the pages is public.
Pages load everything from this server.
"""

import secrets
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_VARIABLE = "AGENTRL_UI_TOKEN"
_CONTENT_POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"),
        *("img-src 'self' data:", "base-uri 'none'", "form-action 'none'"),
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TOKEN_REQUIRED = (
    "This inspector requires a token: open the address with ?token= that `agentrl ui` printed.\n"
)


class ReaderAccess:
    """ASGI middleware that admits requests for data with a key, and protects the responses."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        """Wrap an application."""
        self._app = app
        self._token = token
        self._page_key = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        response = self._response_to(Request(scope))
        await (response or self._app)(scope, receive, send_with_headers)

    def _response_to(self, request: Request) -> Response | None:
        """Return the response to a refused request; None for an allowed one."""
        query = request.query_params
        # What the router compares with; all data has such a path.
        if request.scope["path"].startswith("/api/"):
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
            # Browsers send no header for images and events.
            page_key = bearer or query.get("access", "")
            if _equal(page_key, self._page_key) or _equal(bearer, self._token):
                return None
        elif "token" not in query:
            return None
        elif _equal(query["token"], self._token):
            # Removes the token from the address bar, the history and copied links.
            others = [one for one in query.multi_items() if one[0] != "token"]
            place = "/" + request.url.path.lstrip("/")
            page = f"{place}?{urlencode(others)}" if others else place
            return RedirectResponse(f"{page}#key={self._page_key}", status_code=303)
        return PlainTextResponse(_TOKEN_REQUIRED, status_code=401)


def _equal(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())
