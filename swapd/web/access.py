"""AccessRules to the page: the token, the allowed host names, and the headers for browsers.

Without a token, on the loopback, a page of another site could make a browser ask here by its own
host name (DNS rebinding): so only the address's own names are served then.
"""

import base64
import hashlib
import hmac
import re

from swapd.web.http import Answer, Headers, HttpRequest

#: Paths that need no token: they reveal nothing but that a swapd is here.
OPEN = ("/", "/healthz")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class AccessRules:
    def __init__(self, token: str, host: str) -> None:
        """`token`: "" if none is needed. `host`: the IP address or name that is served."""
        self._token = token.encode()
        self._names = (*_LOOPBACK, f"[{host}]" if ":" in host else host)

    def refusal(self, request: HttpRequest) -> Answer | None:
        asked = request.headers.get
        if asked("sec-fetch-site") == "cross-site" and asked("sec-fetch-mode") != "navigate":
            return Answer(403, b"not for pages of other sites\n")
        if not self._token:
            if _name(asked("host", "")) in self._names:
                return None
            return Answer(421, f"ask for it by {' or '.join(self._names[:2])}\n".encode())
        if request.path in OPEN or self._knows(asked("authorization", "")):
            return None
        about = (("www-authenticate", 'Bearer realm="swapd"'),)
        return Answer(401, b"a token is needed: Authorization: Bearer ...\n", headers=about)

    def _knows(self, authorization: str) -> bool:
        kind, _, given = authorization.partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode(errors="replace"), self._token
        )


def _name(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0].lower()


def headers_for(page: str) -> Headers:
    """The headers of every answer: browsers load and run only the page's own parts, show it in no
    other page, and keep nothing."""
    allowed = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        )
        for kind in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "img-src data:; connect-src 'self'; form-action 'none'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )
    return [
        ("cache-control", "no-store"),
        ("content-security-policy", policy),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
    ]
