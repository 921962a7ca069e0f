"""Access control: a token for every request, and security headers on every response.

Loopback is open to every user of the machine but a run's texts are not, so the token is required
there too. It arrives once in the printed address, or as a bearer token. The pages then have a cookie
that is hidden from scripts and other sites: a random value of this process, because a browser sends
it to every port of the host, also to a program that takes this port after a restart. Pages load
everything from this server.
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
    """ASGI middleware that admits requests with the token, and protects the responses."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        """Wrap an application.

        Args:
            app: the application.
            token: the token that a request must present.
            port: part of the cookie's name; cookies of one host are shared by all its ports.
        """
        self._app = app
        self._token = token
        self._cookie = f"agentrl_ui_{port}"
        self._cookie_value = secrets.token_urlsafe(32)

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
        given = request.query_params.get("token")
        if given is not None and _equal(given, self._token) and request.method == "GET":
            # Removes the token from the address bar, the history and copied links.
            others = [one for one in request.query_params.multi_items() if one[0] != "token"]
            place = "/" + request.url.path.lstrip("/")
            page = f"{place}?{urlencode(others)}" if others else place
            response = RedirectResponse(page, status_code=303)
            response.set_cookie(self._cookie, self._cookie_value, httponly=True, samesite="strict")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        cookie = request.cookies.get(self._cookie, "")
        if _equal(cookie, self._cookie_value) or _equal(bearer, self._token):
            return None
        return PlainTextResponse(_TOKEN_REQUIRED, status_code=401)


def _equal(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())
