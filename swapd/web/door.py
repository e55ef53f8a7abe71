"""Access to the page: the token, the allowed host names, and the headers for browsers.

On the loopback, a page of another site could make a browser ask here by its own host name (DNS
rebinding): so only the loopback's names are served there. Elsewhere the token is required, which
such a page does not have.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

COOKIE = "swapd"
#: Largest login form.
FORM_MAX_BYTES = 4096
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

App = Callable[[Any, Any, Any], Awaitable[None]]

_LOGIN = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>swapd</title>
<body><form method="post" action="/login"><label>Token of this swapd
<input type="password" name="token" autocomplete="current-password" autofocus></label>
<button>Show</button></form></body></html>"""


class Door:
    """Wraps an ASGI app, and lets in only requests with access."""

    def __init__(self, app: App, token: str, *, loopback: bool, policy: str) -> None:
        """`token`: "" if none is needed. `policy`: the page's content security policy."""
        self._app = app
        self._token = token.encode()
        self._loopback = loopback
        #: The cookie's value: it is valid for this token, and does not reveal it.
        self._cookie = hmac.new(self._token, b"swapd page", hashlib.sha256).hexdigest()
        self._headers = [
            (b"cache-control", b"no-store"),
            (b"content-security-policy", policy.encode()),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
            (b"x-frame-options", b"DENY"),
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def headed(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        request = Request(scope, receive)
        answer = await self._refusal(request)
        await (answer or self._app)(scope, receive, headed)

    async def _refusal(self, request: Request) -> Response | None:
        """The refusal of a request; None if it is let in."""
        if self._loopback and _name(request.headers.get("host", "")) not in _LOOPBACK:
            return PlainTextResponse("ask for it by localhost or 127.0.0.1\n", 421)
        if _from_another_site(request):
            return PlainTextResponse("not for pages of other sites\n", 403)
        if not self._token or request.url.path == "/healthz":
            return None
        if request.url.path == "/login" and request.method == "POST":
            return await self._login(request)
        if self._knows(request):
            return None
        if request.url.path == "/":
            return HTMLResponse(_LOGIN, 401)
        about = {"www-authenticate": 'Bearer realm="swapd"'}
        return PlainTextResponse("a token is needed: Authorization: Bearer ...\n", 401, about)

    def _knows(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(given.strip()):
            return True
        cookie = request.cookies.get(COOKIE, "")
        return hmac.compare_digest(cookie.encode(), self._cookie.encode())

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token)

    async def _login(self, request: Request) -> Response:
        body = b""
        async for some in request.stream():
            body += some
            if len(body) > FORM_MAX_BYTES:
                return PlainTextResponse("too long\n", 413, {"connection": "close"})
        form = parse_qs(body.decode(errors="replace"), max_num_fields=4)
        if not self._is_token(form.get("token", [""])[0]):
            return HTMLResponse(_LOGIN, 401)
        there = RedirectResponse("/", 303)
        there.set_cookie(COOKIE, self._cookie, httponly=True, samesite="strict")
        return there


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0].lower()


def _from_another_site(request: Request) -> bool:
    """Whether a page of another site sent the request, except to follow a link."""
    told = request.headers.get
    return told("sec-fetch-site") == "cross-site" and told("sec-fetch-mode") != "navigate"
