"""Access control of the page: the same credentials, roles and limits as for gRPC callers.

Rule: without valid credentials every path but the login and its assets returns 401. A browser gets
a random session id in place of its token, known to this process only; each request checks that the
token is still valid. Without authentication, a page on loopback answers only to local host names:
a foreign web site must not read it through a visitor's browser (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import secrets
import ssl
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

import anyio
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic.coord.audit import Audit
from elastic.coord.roles import ANYONE, Caller, Role
from elastic.coord.server_guard import AccessRules
from elastic.coord.server_limits import AdmissionLimiter
from elastic.coord.web.pages import login_page, plain_page
from elastic.core.config import NS_PER_S
from elastic.errors import (
    Busy,
    ElasticError,
    NotAuthorized,
    NotFound,
    NotPermitted,
    Refused,
)
from elastic.runtime.clock import Clock
from elastic.runtime.rpc import is_loopback

COOKIE = "elastic_page"
SESSION_S = 12 * 3600
SESSIONS_MAX = 1000
FORM_BYTES_MAX = 8192
PAGE_ROLES = frozenset({Role.READ, Role.SUBMIT, Role.ADMIN})
STATUSES: tuple[tuple[type[ElasticError], int], ...] = (
    (NotPermitted, 403),
    (NotAuthorized, 401),
    (Busy, 429),
    (NotFound, 404),
    (Refused, 403),
)
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    # With "no-referrer" browsers send "Origin: null" with our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass
class Sessions:
    """Session ids that browsers send in place of a token, in the memory of this process only."""

    clock: Clock
    _tokens: OrderedDict[str, tuple[str, int]] = field(default_factory=OrderedDict)

    def open(self, token: str) -> str:
        """Return a new session id for a token."""
        secret = secrets.token_urlsafe(32)
        until_ns = self.clock.monotonic_ns() + SESSION_S * NS_PER_S
        self._tokens[_digest(secret)] = token, until_ns
        if len(self._tokens) > SESSIONS_MAX:
            self._tokens.popitem(last=False)
        return secret

    def token(self, secret: str) -> str:
        """Return the token of a session id, "" if unknown or expired."""
        token, until_ns = self._tokens.get(_digest(secret), ("", 0))
        return token if self.clock.monotonic_ns() < until_ns else ""

    def close(self, secret: str) -> None:
        self._tokens.pop(_digest(secret), None)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


class Gate:
    """ASGI middleware: admits requests, or refuses them with an error that says what to do."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        locks: AccessRules,
        limiter: AdmissionLimiter,
        audit: Audit,
        clock: Clock,
        is_local: bool,
    ) -> None:
        """Guard `app`.

        Args:
            app: makes the pages.
            locks: the credentials required of callers.
            limiter: limits their requests.
            audit: records refusals.
            clock: for the expiry of sessions and certificates.
            is_local: the server listens on loopback only.
        """
        self._app = app
        self._locks = locks
        self._limiter = limiter
        self._audit = audit
        self._clock = clock
        self._is_local = is_local
        self._sessions = Sessions(clock)

    @property
    def asks_token(self) -> bool:
        """Return whether callers authenticate with tokens."""
        return bool(self._locks.token) or self._locks.tokens is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        request = Request(scope, receive)
        try:
            self._check_origin(request)
            if request.scope["path"] == "/login" and self.asks_token:
                with self._limiter.without_credentials(_host(request)):
                    response = await self._login(request)
                await response(scope, receive, send_with_headers)
            elif request.scope["path"] == "/logout" and request.method == "POST":
                response = self._logout(request)
                await response(scope, receive, send_with_headers)
            elif request.scope["path"].startswith("/assets/"):
                with self._limiter.without_credentials(_host(request)):
                    await self._app(scope, receive, send_with_headers)
            else:
                caller = self.identify(request)
                scope["state"] = {**scope.get("state", {}), "caller": caller, "gate": self}
                who = caller.name or _host(request)
                is_stream = request.scope["path"].endswith("/stream")
                with self._limiter.user(who, streams=is_stream):
                    await self._app(scope, receive, send_with_headers)
        except ClientDisconnect:
            return  # The client is gone.
        except ElasticError as error:
            action = f"{request.method} {request.scope['path'][:100]}"
            kind = type(error).__name__
            self._audit.refused(action, peer=_peer(request), kind=kind, reason=str(error))
            await self._refusal(request, error)(scope, receive, send_with_headers)

    def identify(self, request: Request) -> Caller:
        """Return the caller of a request.

        Raises:
            NotAuthorized: the credentials are missing or not valid.
            NotPermitted: their role may not see pages.
        """
        certificate = b""
        der = request.scope.get("state", {}).get("certificate", b"")
        if der:
            certificate = ssl.DER_cert_to_PEM_cert(der).encode()
        caller = self._locks.identify(
            self._token(request.headers), certificate, _host(request), self._clock.unix_ns()
        )
        if caller.role not in PAGE_ROLES:
            wanted = " or ".join(role.value for role in Role if role in PAGE_ROLES)
            raise NotPermitted(f"{caller} may not read jobs: that needs the role {wanted}")
        return caller

    def why_over(self, caller: Caller) -> str:
        """Return why a caller's credentials are no longer valid, "" if they are."""
        return self._locks.why_over(caller, self._clock.unix_ns())

    def _token(self, headers: Mapping[str, str]) -> str:
        kind, _, shown = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return shown.strip()
        return self._sessions.token(_session_secret(headers))

    def _check_origin(self, request: Request) -> None:
        """Check that no page of another origin sent the request.

        Raises:
            Refused: one did, or a local page was requested by a foreign host name.
        """
        origin = request.headers.get("origin", "")
        host = request.headers.get("host", "")
        try:
            sent_from = urlsplit(origin).netloc
        except ValueError:
            sent_from = "null"
        if request.method != "GET" and origin and sent_from != host:
            raise Refused(f"a page of {origin} may not send anything to this coordinator")
        opens = not self.asks_token and not self._locks.asks_certificate
        if opens and self._is_local and not is_loopback(urlsplit(f"//{host}").hostname or ""):
            raise Refused(
                f"this page is for this machine alone, and was asked for as {host[:100]!r}: open "
                f"it as localhost, or 127.0.0.1"
            )

    async def _login(self, request: Request) -> Response:
        if request.method == "GET":
            return HTMLResponse(login_page("", _then(request.query_params.get("then", "/"))))
        limit_s = self._limiter.limits.request_s_max
        try:
            with anyio.fail_after(limit_s):
                fields = await _login_fields(request)
        except TimeoutError:
            text = f"the login did not arrive within {limit_s:g} s; send it again\n"
            return PlainTextResponse(text, 408, {"connection": "close"})
        token = fields.get("token", [""])[0].strip()
        then = _then(fields.get("then", ["/"])[0])
        caller = self._locks.identify(token, b"", _host(request), self._clock.unix_ns())
        if caller.role not in PAGE_ROLES:
            raise NotPermitted(f"{caller} may not read jobs")
        response = RedirectResponse(then, status_code=303)
        response.set_cookie(
            COOKIE,
            self._sessions.open(token),
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    def _logout(self, request: Request) -> Response:
        self._sessions.close(_session_secret(request.headers))
        response = RedirectResponse("/login", status_code=303)
        response.delete_cookie(COOKIE, path="/")
        return response

    def _refusal(self, request: Request, error: ElasticError) -> Response:
        status = status_of(error)
        text = str(error)
        headers = {"www-authenticate": "Bearer"} if status == 401 else None
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(f"{text}\n", status, headers)
        if status == 401 and self.asks_token:
            then = request.scope["path"] if request.scope["path"] != "/login" else "/"
            had_token = bool(_session_secret(request.headers)) or request.method == "POST"
            return HTMLResponse(login_page(text if had_token else "", then), status, headers)
        return HTMLResponse(plain_page("Refused", text), status, headers)


async def _login_fields(request: Request) -> dict[str, list[str]]:
    """Read the form of a login.

    Raises:
        Refused: it is too long, or no form.
        ClientDisconnect: the rest of it will not come.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES_MAX:
            raise Refused(f"a login of more than {FORM_BYTES_MAX} bytes")
    try:
        return parse_qs(body.decode("utf-8", "replace"), max_num_fields=8)
    except ValueError as error:
        raise Refused(f"not a login: {error}") from None


def status_of(error: ElasticError) -> int:
    """Return the HTTP status for an error."""
    for kind, status in STATUSES:
        if isinstance(error, kind):
            return status
    return 503


def shown_name(caller: Caller) -> str:
    """Return the name of a page's viewer, "" without authentication."""
    return "" if caller is ANYONE or caller == ANYONE else str(caller)


def _session_secret(headers: Mapping[str, str]) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""


def _peer(request: Request) -> str:
    """Return the client's address in gRPC's format, with host and port."""
    port = request.client.port if request.client is not None else 0
    return f"http:{_host(request)}:{port}"


def _then(path: str) -> str:
    """Return the path if it is on this site, else "/": a login must not redirect elsewhere."""
    is_ours = path.startswith("/") and not path.startswith(("//", "/\\"))
    return path if is_ours and path.isprintable() and len(path) < 500 else "/"


def _host(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"
