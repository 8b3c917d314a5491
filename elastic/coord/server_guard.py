"""The guard at the door: who calls, whether they may, and whether this coordinator leads.

Rule: no service sees a call, and no message of one is read, before the guard let it in. A token or
certificate that is revoked or ends while a call goes on ends the call. Health and reflection need
neither a version nor leadership, because general tools and load balancers ask them. A standby lets
in who only reads, and agents, who may wait at its door.
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
"""What was revoked, or is over, opens nothing, and holds nothing open, after this."""
PEER_CERTIFICATE = "x509_pem_cert"
ATTACH = "/elastic.v1.Agents/Attach"
SUBMIT = "/elastic.v1.Jobs/Submit"
ANEW = (
    "have it issued anew ('elastic-coord certs issue ... --name {name} --role {role}') and put "
    "into the --tls-dir: it is used from the next connection on"
)
LARGE = (ATTACH, SUBMIT)
"""Methods whose messages may be as large as gRPC takes them: they carry code."""
REQUEST_BYTES_MAX = 64 << 10
PROBE_BYTES_MAX = 4 << 10
"""Of methods for which nobody shows anything; what is asked of them are names."""
READS = ("/elastic.v1.Jobs/Get", "/elastic.v1.Jobs/List", "/elastic.v1.Cluster/Status")
"""What a standby answers from the store."""
NAMING_FIELDS = ("job", "node", "name")

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """What a caller must show. With none of them set, everybody is let in.

    Attributes:
        token: the single token, with all rights; "" for none.
        tokens: tokens with roles, None for none.
        asks_certificate: TLS has checked a certificate, which says who it is.
    """

    token: str = field(default="", repr=False)
    tokens: TokenList | None = None
    asks_certificate: bool = False

    def identify(self, token: str, certificate: bytes, peer: str, now_ns: int) -> Caller:
        """Return who calls.

        Args:
            token: that the call brought, "" for none.
            certificate: that TLS has checked when the connection began, PEM; b"" for none.
            peer: its address, for the text.
            now_ns: Unix time.

        Raises:
            NotAuthorized: it showed nothing, or nothing that opens this door.
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

    def look(self) -> list[tuple[str, str, str]]:
        """Read the files again that changed; returns what did, as (action, who, what)."""
        found = []
        if self.tokens is not None:
            for action, token in self.tokens.look():
                name = f"{token.token_id} {token.name}".strip()
                what = f"token {name} ({token.role.value})"
                found.append((f"token {action}", "the token file", what))
        return found

    def why_over(self, caller: Caller, now_ns: int) -> str:
        """Return why what a caller showed opens nothing any more, "" if it does."""
        if caller.token_id and self.tokens is not None:
            return self.tokens.why_over(caller.token_id)
        if caller.shown is None or now_ns < caller.shown.until_ns:
            return ""
        anew = ANEW.format(role=caller.role.value, name=caller.name)
        return f"{caller.shown} has expired; {anew}"


def _of_certificate(certificate: bytes, peer: str) -> Caller:
    """Return whom a certificate names; it must be one caller alone."""
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
    """A call that goes on."""

    caller: Caller
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: str = ""


class Guard(grpc.aio.ServerInterceptor):
    """Lets calls in or refuses them with what to do.

    The one base class is gRPC's: it recognises interceptors by nothing else.

    Attributes:
        answered: by method, how long requests took until they were answered.
    """

    def __init__(
        self,
        locks: AccessRules,
        audit: Audit,
        clock: Clock,
        office: LeaderState,
        *,
        limits: ServerLimits | None = None,
    ) -> None:
        """Refuse by what `office` says at each call.

        Args:
            locks: what callers must show.
            audit: told of changes and refusals.
            clock: for the limits, and the ends of certificates.
            office: says whether this coordinator leads.
            limits: how much callers may ask for.
        """
        self.office = office
        self._locks = locks
        self._audit = audit
        self._limits = limits or ServerLimits()
        self._clock = clock
        self._endpoint = AdmissionLimiter(self._limits, clock)
        self._calls: dict[_Call, None] = {}
        self.answered: dict[str, Histogram] = {}

    async def watch_locks(self) -> None:
        """Follow what is revoked, and end calls of whom it concerns; never returns.

        A connection says once who it is, and may stand for weeks: so calls are looked at.
        """
        while True:
            # A file system that hangs must not take the coordinator along.
            for action, who, what in await anyio.to_thread.run_sync(
                self._locks.look, abandon_on_cancel=True
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
        """Return a handler that lets the call in or refuses it.

        It is one for streams, whatever the method is: only so is nothing read before.
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
            # Users ask again and again while nobody leads; that is said once, by who led.
            if not isinstance(error, NotLeading):
                self._audit.refused(method, peer=context.peer(), kind=kind, reason=str(error))
            await context.abort(*status_of(error))
        except grpc.aio.AbortError as error:
            # Its frames keep what was asked for, in a circle that nobody looks at for long.
            error.__traceback__ = error.__context__ = None
            raise
        except DecodeError as error:
            # Reflection reads inside of what it was sent.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no such request: {error}")
        except NotImplementedError:
            name = method.rpartition("/")[2]
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served here")

    def _admit(self, method: str, context: Context) -> Caller:
        """Return who calls, if they may.

        Raises:
            ElasticError: they may not, or not now.
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
        if self.office.tenure is None and method != ATTACH:
            wants_leader = any(str(key).lower() == FRESH_KEY for key, _ in metadata)
            if method not in READS or wants_leader:
                raise self.office.refusal()
        return caller

    def _room(
        self, method: str, handler: Handler, caller: Caller, context: Context
    ) -> AbstractContextManager[None]:
        if method == ATTACH:
            return self._endpoint.agent(caller.name if caller.is_bound else "")
        if RULES[method].roles is None:
            # Who shows nothing takes nothing from those who do.
            return self._endpoint.stranger(host_of(context.peer()))
        who = caller.name or host_of(context.peer())
        streams = bool(handler.request_streaming or handler.response_streaming)
        return self._endpoint.user(who, streams=streams)

    def _turn(self, method: str) -> AbstractAsyncContextManager[None]:
        return self._endpoint.submission() if method == SUBMIT else nullcontext()

    async def _perform(
        self, method: str, handler: Handler, messages: AsyncIterator[Any], context: Context
    ) -> None:
        """Call the method's own handler, whichever of the four kinds it is."""
        behaviour: Any = handler.stream_stream
        if behaviour is not None:
            await self._write_all(behaviour(messages, context), context)
            return
        behaviour = handler.unary_unary or handler.unary_stream
        request, began_ns = await self._request(method, context), self._clock.monotonic_ns()
        if self.office.coordinators and RULES[method].roles is not None:
            told = ",".join(self.office.coordinators)
            await context.send_initial_metadata(((COORDINATORS_KEY, told),))
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
            # gRPC keeps the error of a refusal, that keeps its frames, and they gRPC's call: what
            # was refused, of megabytes maybe, would stay until the next look for such circles.
            del request

    async def _request(self, method: str, context: Context) -> Any:
        """Return the one message of a request.

        Raises:
            PeerError: it did not come, or is none of this method.
        """
        request: Any = grpc.aio.EOF
        problem = "sent no request"
        with anyio.move_on_after(self._limits.request_s_max):
            try:
                request = await context.read()
            except Exception as error:  # Whatever protobuf or gRPC make of strange bytes.
                why = str(error) if isinstance(error, ValueError) else type(error).__name__
                problem = f"sent what is no request of it ({why[:100]})"
                error.__traceback__ = None  # Its frames keep the bytes.
        if request is grpc.aio.EOF:
            raise PeerError(f"{context.peer()} called {method} and {problem}")
        return request

    async def _write_all(self, answers: Any, context: Context) -> None:
        """Write what a stream yields; one that writes by itself is only waited for."""
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
    """Return what reads a method's requests, and refuses longer ones than it can have."""
    if read is None or method in LARGE:
        return read
    rule = RULES.get(method)
    limit = REQUEST_BYTES_MAX if rule is not None and not rule.general else PROBE_BYTES_MAX

    def read_short(data: bytes) -> Any:
        if len(data) > limit:
            raise ValueError(f"{len(data)} bytes, at most {limit} are taken")
        return read(data)

    return read_short


def _object_of(request: Any, response: Any) -> str:
    """Return what a request is about, in words: "job=digits job_id=j-abcdef"."""
    found = {name: str(getattr(request, name, "")) for name in NAMING_FIELDS}
    found["name"] = found["name"] or str(getattr(getattr(request, "spec", None), "name", ""))
    found["job_id"] = str(getattr(response, "job_id", ""))
    return " ".join(f"{name}={quoted(value)}" for name, value in found.items() if value)
