"""The guard, a gRPC interceptor: authenticates and authorizes calls, and checks leadership.

Rule: no service sees a call, and no message of it is read, before the guard admits it. A token or
certificate that is revoked or expires during a call ends the call. Health and reflection need
neither a version nor leadership, because general tools and load balancers call them. A standby
admits calls that only read, and agents, which may wait for a new leader.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    nullcontext,
)
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from elastic.coord.audit import OK, Audit, host_of
from elastic.coord.leader_state import LeaderState
from elastic.coord.roles import ANYONE, CALLER, RULES, Caller, Role, Rule, caller_of_uri
from elastic.coord.server_limits import AdmissionLimiter, ServerLimits
from elastic.coord.tokens import TokenList
from elastic.core.config import NS_PER_S
from elastic.core.messages import PROTOCOL
from elastic.errors import Busy, ElasticError, NotAuthorized, NotLeading, PeerError, Refused
from elastic.runtime.certificates import read_shown
from elastic.runtime.clock import Clock
from elastic.runtime.eventlog import quoted
from elastic.runtime.exposition import Histogram
from elastic.runtime.rpc import (
    COORDINATORS_KEY,
    FRESH_KEY,
    PROTOCOL_KEY,
    bearer_of,
    check_version,
    status_of,
    version_of,
)

log = logging.getLogger(__name__)

POLL_S = 0.5
"""A revoked or expired token or certificate loses all access within this time."""
PEER_CERTIFICATE = "x509_pem_cert"
ATTACH = "/elastic.v1.Agents/Attach"
SUBMIT = "/elastic.v1.Jobs/Submit"
ANEW = (
    "have it issued anew ('elastic-coord certs issue ... --name {name} --role {role}') and put "
    "into the --tls-dir: it is used from the next connection on"
)
LARGE = (ATTACH, SUBMIT)
"""Methods whose messages are limited by gRPC's maximum only: they carry code."""
REQUEST_BYTES_MAX = 64 << 10
PROBE_BYTES_MAX = 4 << 10
"""Limit for methods without authentication; their requests hold only names."""
READS = ("/elastic.v1.Jobs/Get", "/elastic.v1.Jobs/List", "/elastic.v1.Cluster/Status")
"""Methods that a standby answers from the store."""
NAMING_FIELDS = ("job", "node", "name")

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """The credentials required of callers. With none of them set, all callers are admitted.

    Attributes:
        token: the single token, with all rights; "" for none.
        tokens: tokens with roles, None for none.
        asks_certificate: callers are identified by the certificate that TLS has verified.
    """

    token: str = field(default="", repr=False)
    tokens: TokenList | None = None
    asks_certificate: bool = False

    def identify(self, token: str, certificate: bytes, peer: str, now_ns: int) -> Caller:
        """Return the caller that the credentials identify.

        Args:
            token: sent with the call, "" for none.
            certificate: that TLS verified when the connection began, PEM; b"" for none.
            peer: its address, for the text.
            now_ns: Unix time.

        Raises:
            NotAuthorized: the credentials are missing, unknown or expired.
        """
        if self.asks_certificate:
            shown = _of_certificate(certificate, peer)
            if why := self.why_over(shown, now_ns):
                raise NotAuthorized(why)
            return shown
        if not self.token and self.tokens is None:
            return ANYONE
        if not token:
            raise NotAuthorized(
                f"{peer} came without a token, this coordinator asks for one; pass --token-file "
                f"(or ELASTIC_TOKEN_FILE) with a token of this cluster"
            )
        if self.token and hmac.compare_digest(token.encode(), self.token.encode()):
            return Caller(Role.ADMIN, "", "token")
        caller = self.tokens.caller(token) if self.tokens is not None else None
        if caller is None:
            raise NotAuthorized(
                f"{peer} came with a wrong token; pass a --token-file that holds the token of this "
                f"cluster's coordinator"
            )
        return caller

    def reload(self) -> list[tuple[str, str, str]]:
        """Reread changed files; return the changes, as (action, who, what)."""
        found = []
        if self.tokens is not None:
            for action, token in self.tokens.reload():
                name = f"{token.token_id} {token.name}".strip()
                what = f"token {name} ({token.role.value})"
                found.append((f"token {action}", "the token file", what))
        return found

    def why_over(self, caller: Caller, now_ns: int) -> str:
        """Return why a caller's credentials are no longer valid, "" if they are."""
        if caller.token_id and self.tokens is not None:
            return self.tokens.why_over(caller.token_id)
        if caller.shown is None or now_ns < caller.shown.until_ns:
            return ""
        anew = ANEW.format(role=caller.role.value, name=caller.name)
        return f"{caller.shown} has expired; {anew}"


def _of_certificate(certificate: bytes, peer: str) -> Caller:
    """Return the caller that a certificate names; it must name exactly one."""
    shown = read_shown(certificate) if certificate else None
    uris = shown.uris if shown is not None else ()
    callers = [caller for uri in uris if (caller := caller_of_uri(uri)) is not None]
    if len(callers) != 1:
        raise NotAuthorized(
            f"the certificate of {peer} names no role; use one that 'elastic-coord certs issue "
            f"--role ...' made"
        )
    return replace(callers[0], shown=shown)


@dataclass(eq=False)
class _Call:
    """A call in progress; `over` is why its credentials became invalid."""

    caller: Caller
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: str = ""


class Guard(grpc.aio.ServerInterceptor):
    """Admits calls, or refuses them with an error that says what to do.

    The base class is gRPC's: gRPC recognises interceptors only by it.

    Attributes:
        answered: by method, how long requests took until they were answered.
    """

    def __init__(
        self,
        locks: AccessRules,
        audit: Audit,
        clock: Clock,
        leader_state: LeaderState,
        *,
        limits: ServerLimits | None = None,
    ) -> None:
        self.leader_state = leader_state
        self._locks = locks
        self._audit = audit
        self._limits = limits or ServerLimits()
        self._clock = clock
        self._endpoint = AdmissionLimiter(self._limits, clock)
        self._calls: dict[_Call, None] = {}
        self.answered: dict[str, Histogram] = {}

    async def watch_locks(self) -> None:
        """Poll for revocations, and end the calls that they affect; never returns.

        A connection authenticates once, and may stay open for weeks: so each call is checked.
        """
        while True:
            # In a thread: a file system that hangs must not block the coordinator.
            for action, who, what in await anyio.to_thread.run_sync(
                self._locks.reload, abandon_on_cancel=True
            ):
                self._audit.changed(action, who=who, peer="", what=what, outcome=OK)
            now_ns = self._clock.unix_ns()
            for call in list(self._calls):
                if why := self._locks.why_over(call.caller, now_ns):
                    call.over = why
                    call.scope.cancel()
            await anyio.sleep(POLL_S)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return a handler that admits the call or refuses it.

        It is a stream handler whatever the method is: otherwise gRPC would read the request first.
        """
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)

        async def serve(messages: AsyncIterator[Any], context: Context) -> None:
            await self._serve(method, handler, messages, context)

        return grpc.stream_stream_rpc_method_handler(
            serve, _limited(method, handler.request_deserializer), handler.response_serializer
        )

    # -------------------------------------------------------------------------- one call

    async def _serve(
        self, method: str, handler: Handler, messages: AsyncIterator[Any], context: Context
    ) -> None:
        try:
            call = _Call(self._admit(method, context))
            with self._room(method, handler, call.caller, context):
                self._calls[call] = None
                CALLER.set(call.caller)
                try:
                    with call.scope:
                        async with self._turn(method):
                            await self._perform(method, handler, messages, context)
                finally:
                    del self._calls[call]
            if call.over:
                raise NotAuthorized(f"a call was ended: {call.over}")
        except ElasticError as error:
            kind = type(error).__name__
            # Users retry while there is no leader; the former leader has logged that once.
            if not isinstance(error, NotLeading):
                self._audit.refused(method, peer=context.peer(), kind=kind, reason=str(error))
            await context.abort(*status_of(error))
        except grpc.aio.AbortError as error:
            # Its frames keep the request alive, in a reference cycle that is collected late.
            error.__traceback__ = error.__context__ = None
            raise
        except DecodeError as error:
            # Reflection reads its requests, and parses part of them, itself.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no such request: {error}")
        except NotImplementedError:
            name = method.rpartition("/")[2]
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served here")

    def _admit(self, method: str, context: Context) -> Caller:
        """Return the caller, if the call is permitted.

        Raises:
            ElasticError: it is not, or not now.
        """
        rule = RULES.get(method, Rule(frozenset()))
        metadata = tuple(context.invocation_metadata() or ())
        caller = ANYONE
        if rule.roles is not None:
            (certificate,) = context.auth_context().get(PEER_CERTIFICATE, (b"",))
            caller = self._locks.identify(
                bearer_of(metadata), certificate, context.peer(), self._clock.unix_ns()
            )
            caller.check_may_call(method)
        if rule.general:
            return caller
        version = version_of(metadata)
        if not version:
            raise Refused(
                f"the call names no protocol version; use a client of elastic-torch, or send the "
                f"metadata {PROTOCOL_KEY}: {PROTOCOL}"
            )
        check_version(version, context.peer())
        if self.leader_state.tenure is None and method != ATTACH:
            wants_leader = any(str(key).lower() == FRESH_KEY for key, _ in metadata)
            if method not in READS or wants_leader:
                raise self.leader_state.refusal()
        return caller

    def _room(
        self, method: str, handler: Handler, caller: Caller, context: Context
    ) -> AbstractContextManager[None]:
        if method == ATTACH:
            return self._endpoint.agent(caller.name if caller.is_bound else "")
        if RULES[method].roles is None:
            # Calls without credentials use none of the capacity of authenticated ones.
            return self._endpoint.without_credentials(host_of(context.peer()))
        who = caller.name or host_of(context.peer())
        streams = bool(handler.request_streaming or handler.response_streaming)
        return self._endpoint.user(who, streams=streams)

    def _turn(self, method: str) -> AbstractAsyncContextManager[None]:
        return self._endpoint.submission() if method == SUBMIT else nullcontext()

    async def _perform(
        self, method: str, handler: Handler, messages: AsyncIterator[Any], context: Context
    ) -> None:
        """Call the method's own handler, whichever of gRPC's four kinds it is."""
        behaviour: Any = handler.stream_stream
        if behaviour is not None:
            await self._write_all(behaviour(messages, context), context)
            return
        behaviour = handler.unary_unary or handler.unary_stream
        request, began_ns = await self._request(method, context), self._clock.monotonic_ns()
        if self.leader_state.coordinators and RULES[method].roles is not None:
            addresses = ",".join(self.leader_state.coordinators)
            await context.send_initial_metadata(((COORDINATORS_KEY, addresses),))
        outcome, response = "the call ended before its answer", None
        try:
            answer = behaviour(request, context)
            if hasattr(answer, "__aiter__"):
                await self._write_all(answer, context)
            elif (response := await answer) is not None:
                await self._write(response, context)
                took_s = (self._clock.monotonic_ns() - began_ns) / NS_PER_S
                self.answered.setdefault(method, Histogram()).add(took_s)
            outcome = OK
        except grpc.aio.AbortError:
            outcome = context.details()
            raise
        finally:
            if RULES[method].audited:
                self._audit.changed(
                    method.rpartition("/")[2],
                    who=str(CALLER.get()),
                    peer=context.peer(),
                    what=_object_of(request, response),
                    outcome=outcome,
                )
            # gRPC keeps a refusal's error, the error its frames, and the frames gRPC's call: a
            # refused request, perhaps megabytes, would stay until the next cycle collection.
            del request

    async def _request(self, method: str, context: Context) -> Any:
        """Return the one message of a request.

        Raises:
            PeerError: it did not arrive in time, or cannot be parsed for this method.
        """
        request: Any = grpc.aio.EOF
        problem = "sent no request"
        with anyio.move_on_after(self._limits.request_s_max):
            try:
                request = await context.read()
            except Exception as error:  # Whatever protobuf or gRPC raise for invalid bytes.
                why = str(error) if isinstance(error, DecodeError) else type(error).__name__
                problem = f"sent what is no request of it ({why[:100]})"
                error.__traceback__ = None  # Its frames keep the bytes.
        if request is grpc.aio.EOF:
            raise PeerError(f"{context.peer()} called {method} and {problem}")
        return request

    async def _write_all(self, answers: Any, context: Context) -> None:
        """Write what a stream yields; a handler that writes by itself is only awaited."""
        if not hasattr(answers, "__aiter__"):
            await answers
            return
        async with aclosing(answers) as responses:
            async for response in responses:
                await self._write(response, context)

    async def _write(self, response: Any, context: Context) -> None:
        with anyio.move_on_after(self._limits.stall_s_max):
            await context.write(response)
            return
        raise Busy(
            f"{context.peer()} took nothing for {self._limits.stall_s_max:g} s; read faster, or "
            f"open the stream anew"
        )


def _limited(method: str, read: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a deserializer for a method's requests that rejects those over its size limit."""
    if read is None or method in LARGE:
        return read
    rule = RULES.get(method)
    limit = REQUEST_BYTES_MAX if rule is not None and not rule.general else PROBE_BYTES_MAX

    def read_short(data: bytes) -> Any:
        if len(data) > limit:
            raise DecodeError(f"{len(data)} bytes, at most {limit} are taken")
        return read(data)

    return read_short


def _object_of(request: Any, response: Any) -> str:
    """Return the objects of a request as text: "job=digits job_id=j-abcdef"."""
    found = {name: str(getattr(request, name, "")) for name in NAMING_FIELDS}
    found["name"] = found["name"] or str(getattr(getattr(request, "spec", None), "name", ""))
    found["job_id"] = str(getattr(response, "job_id", ""))
    return " ".join(f"{name}={quoted(value)}" for name, value in found.items() if value)
