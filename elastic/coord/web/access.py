"""Who may see a page: the locks, roles and limits that gRPC's callers meet, before one is made.

Rule: without what opens the door there is 401 on every path but the login and what it is made of. A
browser is given a word of its own for a token, which this process alone knows; each request asks
anew whether the token still opens. Where nobody has to show anything, only names of this machine
are answered: a web site elsewhere must not read it through a visitor's browser.
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

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
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
LOOKS = frozenset({Role.READ, Role.SUBMIT, Role.ADMIN})
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
    """Words that browsers show in place of a token; none of them outlives this process."""

    clock: Clock
    _tokens: OrderedDict[str, tuple[str, int]] = field(default_factory=OrderedDict)

    def open(self, token: str) -> str:
        """Return a new word for a token."""
        word = secrets.token_urlsafe(32)
        until_ns = self.clock.monotonic_ns() + SESSION_S * NS_PER_S
        self._tokens[_digest(word)] = token, until_ns
        if len(self._tokens) > SESSIONS_MAX:
            self._tokens.popitem(last=False)
        return word

    def token(self, word: str) -> str:
        """Return the token that a word stands for, "" for none."""
        token, until_ns = self._tokens.get(_digest(word), ("", 0))
        return token if self.clock.monotonic_ns() < until_ns else ""

    def close(self, word: str) -> None:
        """Let a word stand for nothing."""
        self._tokens.pop(_digest(word), None)


def _digest(word: str) -> str:
    return hashlib.sha256(word.encode("utf-8", "replace")).hexdigest()


class Gate:
    """Stands before the pages: lets requests in, or refuses them with what to do."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        locks: AccessRules,
        door: AdmissionLimiter,
        audit: Audit,
        clock: Clock,
        is_local: bool,
    ) -> None:
        """Stand before `app`.

        Args:
            app: makes the pages.
            locks: what callers must show.
            door: how much they may ask for.
            audit: told of refusals.
            clock: for ends of sessions and certificates.
            is_local: it listens on this machine alone.
        """
        self._app, self._locks, self._endpoint, self._audit = app, locks, door, audit
        self._clock, self._is_local = clock, is_local
        self._sessions = Sessions(clock)

    @property
    def asks_token(self) -> bool:
        """Return whether callers show tokens."""
        return bool(self._locks.token) or self._locks.tokens is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
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
                with self._endpoint.stranger(_host(request)):
                    response = await self._login(request)
                await response(scope, receive, send_with_headers)
            elif request.scope["path"] == "/logout" and request.method == "POST":
                response = self._logout(request)
                await response(scope, receive, send_with_headers)
            elif request.scope["path"].startswith("/assets/"):
                with self._endpoint.stranger(_host(request)):
                    await self._app(scope, receive, send_with_headers)
            else:
                caller = self.identify(request)
                scope["state"] = {**scope.get("state", {}), "caller": caller, "gate": self}
                who = caller.name or _host(request)
                is_stream = request.scope["path"].endswith("/stream")
                with self._endpoint.user(who, streams=is_stream):
                    await self._app(scope, receive, send_with_headers)
        except ElasticError as error:
            path: str = request.scope["path"]
            self._audit.refused(
                f"{request.method} {path[:100]}",
                peer=_peer(request), kind=type(error).__name__, reason=str(error),
            )  # fmt: skip
            await self._refusal(request, error)(scope, receive, send_with_headers)

    def identify(self, request: Request) -> Caller:
        """Return who asks.

        Raises:
            NotAuthorized: they show nothing, or nothing that opens.
            NotPermitted: it opens no pages.
        """
        certificate = b""
        der = request.scope.get("state", {}).get("certificate", b"")
        if der:
            certificate = ssl.DER_cert_to_PEM_cert(der).encode()
        caller = self._locks.identify(
            self._token(request.headers), certificate, _host(request), self._clock.unix_ns()
        )
        if caller.role not in LOOKS:
            wanted = " or ".join(role.value for role in Role if role in LOOKS)
            raise NotPermitted(f"{caller} may not look at jobs: that needs the role {wanted}")
        return caller

    def why_over(self, caller: Caller) -> str:
        """Return why what a caller showed opens nothing any more, "" if it does."""
        return self._locks.why_over(caller, self._clock.unix_ns())

    def _token(self, headers: Mapping[str, str]) -> str:
        kind, _, shown = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return shown.strip()
        return self._sessions.token(_word(headers))

    def _check_origin(self, request: Request) -> None:
        """Refuse what a page of somebody else has asked for.

        Raises:
            Refused: one has.
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
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > FORM_BYTES_MAX:
                raise Refused(f"a login of more than {FORM_BYTES_MAX} bytes")
        try:
            fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=8)
        except ValueError as error:
            raise Refused(f"not a login: {error}") from None
        token = fields.get("token", [""])[0].strip()
        then = _then(fields.get("then", ["/"])[0])
        caller = self._locks.identify(token, b"", _host(request), self._clock.unix_ns())
        if caller.role not in LOOKS:
            raise NotPermitted(f"{caller} may not look at jobs")
        response = RedirectResponse(then, status_code=303)
        response.set_cookie(
            COOKIE, self._sessions.open(token), max_age=SESSION_S, httponly=True,
            samesite="strict", secure=request.url.scheme == "https", path="/",
        )  # fmt: skip
        return response

    def _logout(self, request: Request) -> Response:
        self._sessions.close(_word(request.headers))
        response = RedirectResponse("/login", status_code=303)
        response.delete_cookie(COOKIE, path="/")
        return response

    def _refusal(self, request: Request, error: ElasticError) -> Response:
        status, text = status_of(error), str(error)
        headers = {"www-authenticate": "Bearer"} if status == 401 else None
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(f"{text}\n", status, headers)
        if status == 401 and self.asks_token:
            then = request.scope["path"] if request.scope["path"] != "/login" else "/"
            had_token = bool(_word(request.headers)) or request.method == "POST"
            return HTMLResponse(login_page(text if had_token else "", then), status, headers)
        return HTMLResponse(plain_page("Refused", text), status, headers)


def status_of(error: ElasticError) -> int:
    """Return the HTTP status for an error."""
    for kind, status in STATUSES:
        if isinstance(error, kind):
            return status
    return 503


def shown_name(caller: Caller) -> str:
    """Return what a page calls whoever looks at it, "" where nobody has to say who they are."""
    return "" if caller is ANYONE or caller == ANYONE else str(caller)


def _word(headers: Mapping[str, str]) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""


def _peer(request: Request) -> str:
    """Return who asks as gRPC writes it, host and port."""
    port = request.client.port if request.client is not None else 0
    return f"http:{_host(request)}:{port}"


def _then(path: str) -> str:
    """Return a path of ours: a login leads nowhere else."""
    is_ours = path.startswith("/") and not path.startswith(("//", "/\\"))
    return path if is_ours and path.isprintable() and len(path) < 500 else "/"


def _host(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"
