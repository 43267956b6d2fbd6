"""Decides which requests the dashboard answers: it checks the host, the origin and the token of each request."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse

ROLE = "td3_robot_role"
"""In the scope of a request, this key holds the role."""
VIEWER, OPERATOR = "viewer", "operator"
"""The roles. A viewer sees everything. An operator may also command the robots."""
_HEADERS = {
    # The dashboard's page must not load scripts, styles or images from another site, and must not connect to another
    # site. Other pages must not show the dashboard in a frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """ASGI middleware that refuses requests from other sites and requests without a token.

    The guard refuses a request whose Host header is not in ``hosts``. Otherwise, another site could let its own name
    point to the dashboard's address, and its scripts could send requests there (DNS rebinding). The first request has
    the token in the address. The answer sets a cookie, which later requests send.

    Args:
        app: the application behind the guard.
        scheme: ``http`` or ``https``.
        hosts: the allowed values of the Host header, in lower case.
        tokens: the token of each role.
        cookie: name of the cookie. Browsers share cookies between the ports of a host, so the name must contain the
            port.
    """

    def __init__(self, app: Any, scheme: str, hosts: frozenset[str], tokens: Mapping[str, str], cookie: str) -> None:
        self._app = app
        self._scheme = scheme
        self._hosts = hosts
        self._tokens = tokens
        self._cookie = cookie

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        given = request.query_params.get("token")
        role = self._role(given if given is not None else request.cookies.get(self._cookie, ""))
        problem = self._problem(request) or ("" if role else "open the address that td3-robot dashboard printed")

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if given is not None and not problem:
                    secure = "; Secure" if self._scheme == "https" else ""
                    cookie = f"{self._cookie}={given}; HttpOnly; SameSite=Strict; Path=/{secure}"
                    headers.append("set-cookie", cookie)
            await send(message)

        app = PlainTextResponse(f"refused: {problem}\n", 403) if problem else self._app
        await app({**scope, ROLE: role}, receive, answer)

    def _role(self, token: str) -> str:
        """The role of a token; empty for an unknown token. The search takes the same time for every token."""
        known = [role for role, own in self._tokens.items() if hmac.compare_digest(own.encode(), token.encode())]
        return known[0] if known else ""

    def _problem(self, request: Request) -> str:
        """Why the guard refuses a request; empty if the guard finds no problem in the headers.

        If the headers show that another site has possibly sent the request, the guard refuses the request.
        """
        hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return f"the Host header is not an address of this dashboard; allowed: {', '.join(sorted(self._hosts))}"
        own = f"{self._scheme}://{hosts[0].lower()}"
        if any(origin.lower() != own for origin in origins):
            return "the request comes from another site"
        if request.method not in ("GET", "HEAD") and not origins:
            return "the request has no Origin header"
        site, mode = request.headers.get("sec-fetch-site", ""), request.headers.get("sec-fetch-mode", "")
        if site in ("cross-site", "same-site") and mode != "navigate":
            return "the request comes from another site"
        return ""
