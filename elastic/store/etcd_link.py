"""Calls to an etcd cluster: one endpoint at a time, the next one when it does not reply.

Rule: every call has a timeout, and this layer retries only idempotent calls: `once` tries a single
endpoint and raises `RequestUnanswered`, so that the caller decides; `repeat` is for idempotent
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio

from elastic.errors import ElasticError, NotAuthorized, StoreError, StoreUnavailable
from elastic.store.etcd_wire import AUTHENTICATE, Method
from elastic.store.rules import closed
from elastic.wire.generated.elastic.etcd.v1 import wire_pb2 as pb

TRY_S = 2.0
TOTAL_S = 10.0
"""Timeout of a request, all tries together; longer than an election of a healthy cluster."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # To pings more often than every 10 s, or without calls, etcd replies with GOAWAY.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Replies carry many entries; etcd itself sets no limit.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
# Makes a member that has lost the others fail at once, instead of blocking the request.
HAS_LEADER = ("hasleader", "true")

UNANSWERED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
    # "too many requests"; a full disk has the same code and is recognized by its text.
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
SIGNS_OF_TLS = ("Socket closed", "TSI_", "SSL_ERROR", "WRONG_VERSION_NUMBER")
"""Parts of gRPC's error texts when only one side uses TLS, or a certificate is not trusted."""
NO_SPACE = "database space exceeded"
FULL = (
    "etcd has no space left for writes (its NOSPACE alarm): run 'etcdctl compaction --physical N' "
    "with the revision N that 'etcdctl endpoint status -w json' shows, 'etcdctl defrag' for each "
    "member, then 'etcdctl alarm disarm'; start the members with --auto-compaction-mode periodic "
    "--auto-compaction-retention 1h, and raise --quota-backend-bytes if that is not enough"
)
# etcd reports these as invalid arguments.
LOGIN_NEEDED = ("user name is empty", "authentication failed", "user name not found")
STALE_LOGIN = ("invalid auth token", "revision of auth store is old")

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class EtcdAccess:
    """Credentials for etcd; all empty for a server without users and TLS.

    Attributes:
        username: etcd user, with `password`.
        password: never logged.
        ca: PEM certificates to verify the server; enables TLS.
        certificate: our own PEM certificate, if the server requires one, with `key`.
        key: PEM private key; never logged.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    ca: bytes = b""
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)


class RequestUnanswered(Exception):
    """A try had no reply: whether the request took effect is unknown."""


class EtcdRefusal(Exception):
    """etcd replied with an error for the caller to interpret; nothing took effect."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code = code
        self.details = details
        super().__init__(f"{code.name}: {details}")


class RetryBudget:
    """Timeout of one request over all its tries, and the pauses between them."""

    def __init__(self, what: str, endpoints: int, total_s: float) -> None:
        """Start the timeout.

        Args:
            what: the request, for the error.
            endpoints: this many tries are made without a pause.
            total_s: seconds until StoreUnavailable.
        """
        self._what = what
        self._endpoints = endpoints
        self._total_s = total_s
        self._until = time.monotonic() + total_s
        self._tries = 0
        self._reported = "it waited for another one"

    def try_s(self) -> float:
        """Return the seconds that the next try may take.

        Raises:
            StoreUnavailable: no time is left.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise StoreUnavailable(
                f"etcd did not answer a {self._what} within {self._total_s:g} s and {self._tries} "
                f"tries (last: {self._reported}); whether it took effect is not known; see that a "
                f"majority of its members runs and can be reached{_hint(self._reported)}"
            )
        return min(TRY_S, left)

    async def pause(self, error: RequestUnanswered) -> None:
        """Record a failed try, and wait if all endpoints have been tried."""
        self._tries += 1
        self._reported = str(error)
        rounds = self._tries - self._endpoints
        if rounds >= 0:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(rounds, 10))
            await asyncio.sleep(max(0.0, min(pause_s, self._until - time.monotonic())))


def _hint(detail: str) -> str:
    """Return advice for a failure that looks like a TLS mismatch, "" for others."""
    if not any(sign in detail for sign in SIGNS_OF_TLS):
        return ""
    return (
        "; if they speak TLS, pass --store-ca, and --store-cert and --store-key where they ask for "
        "a certificate, of the authority that they were set up with"
    )


class EtcdLink:
    """Channels to the members of a cluster; one is used until it fails to reply."""

    def __init__(
        self,
        endpoints: Sequence[str],
        access: Callable[[], EtcdAccess],
        *,
        total_s: float = TOTAL_S,
    ) -> None:
        """Open no connection yet.

        Args:
            endpoints: "host:port" of each member; the first is used first.
            access: returns the present user and certificates; called before each request.
            total_s: timeout of a request, all tries together.
        """
        self.endpoints = tuple(endpoints)
        self._total_s = total_s
        self._current = access
        self._access = access()
        self._channels: dict[int, grpc.aio.Channel] = {}
        # Channels with replaced credentials; closed once no call runs on them.
        self._retired: list[grpc.aio.Channel] = []
        # Number of running calls on each channel, retired ones too.
        self._running: dict[grpc.aio.Channel, int] = {}
        self._asked = 0
        self._token = ""
        self._ended = asyncio.Event()
        self._is_closed = False

    def patience(self, what: str) -> RetryBudget:
        """Return the budget of a request that starts now."""
        return RetryBudget(what, len(self.endpoints), self._total_s)

    async def once(self, method: Method[Answer], request: Any, timeout_s: float) -> Answer:
        """Call one endpoint, once.

        Raises:
            RequestUnanswered: no reply; the next try will use another endpoint.
            EtcdRefusal: etcd refused the request.
            NotAuthorized: wrong or missing user.
        """
        if self._is_closed:
            raise closed()
        index = self._asked
        async with self._held(index) as channel:
            try:
                metadata = await self._metadata(timeout_s)
                answer = await _call(channel, method, request, timeout_s, metadata)
            except grpc.aio.AioRpcError as error:
                raise self._judged(error, index) from None
        if answer is None:
            raise RequestUnanswered("the call ended without a message")
        return answer

    async def repeat(
        self, method: Method[Answer], request: Any, what: str, *, try_s: float = TRY_S
    ) -> Answer:
        """Retry until an endpoint replies; for idempotent requests.

        Raises:
            StoreUnavailable: none did in time.
            EtcdRefusal: etcd refused the request.
            NotAuthorized: wrong or missing user.
        """
        patience = self.patience(what)
        while True:
            try:
                return await self.once(method, request, min(try_s, patience.try_s()))
            except RequestUnanswered as error:
                await patience.pause(error)

    def _judged(self, error: grpc.aio.AioRpcError, index: int) -> Exception:
        """Return the error for a failed call, and switch to another endpoint if that may help."""
        code, details = error.code(), error.details() or ""
        if any(words in details for words in STALE_LOGIN) and self._access.username:
            self._token = ""  # The next try logs in again.
            return RequestUnanswered(details)
        if NO_SPACE in details:
            return StoreUnavailable(FULL)
        if code not in UNANSWERED:
            return self._denied(code, details) or EtcdRefusal(code, details)
        if self._asked == index:  # Otherwise another call has done so already.
            self._asked = (index + 1) % len(self.endpoints)
        return RequestUnanswered(f"{self.endpoints[index]}: {code.name} {details}")

    async def close(self) -> None:
        """Close all channels once the running calls have ended, which have timeouts.

        Closing a channel during a call would raise CancelledError in a task that was not
        cancelled.
        """
        self._is_closed = True
        until = time.monotonic() + 2 * TRY_S
        while self._running and time.monotonic() < until:
            self._ended.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), until - time.monotonic())
        channels = [*self._retired, *self._channels.values()]
        self._channels, self._retired = {}, []
        for channel in channels:
            await channel.close()

    @asynccontextmanager
    async def _held(self, index: int) -> AsyncIterator[grpc.aio.Channel]:
        """Keep the channel to an endpoint open while a call runs on it."""
        channel = self._channel(index)
        self._running[channel] = self._running.get(channel, 0) + 1
        try:
            yield channel
        finally:
            self._running[channel] -= 1
            if not self._running[channel]:
                del self._running[channel]
            self._ended.set()
            await self._close_idle()

    async def _close_idle(self) -> None:
        """Close the channels of earlier credentials on which no call runs any more."""
        idle = [channel for channel in self._retired if channel not in self._running]
        self._retired = [channel for channel in self._retired if channel in self._running]
        for channel in idle:
            await channel.close()

    def _channel(self, index: int) -> grpc.aio.Channel:
        if (now := self._current()) is not self._access:
            self._access, self._token = now, ""
            self._retired += self._channels.values()
            self._channels = {}
        if index not in self._channels:
            endpoint = self.endpoints[index]
            if self._access.ca:
                credentials = grpc.ssl_channel_credentials(
                    self._access.ca, self._access.key or None, self._access.certificate or None
                )
                channel = grpc.aio.secure_channel(endpoint, credentials, options=CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
            self._channels[index] = channel
        return self._channels[index]

    async def _metadata(self, timeout_s: float) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call; log in first if there is a user and no token."""
        if not self._access.username:
            return (HAS_LEADER,)
        if not self._token:
            request = pb.AuthenticateRequest(
                name=self._access.username, password=self._access.password
            )
            async with self._held(self._asked) as channel:
                answer = await _call(channel, AUTHENTICATE, request, timeout_s, (HAS_LEADER,))
            self._token = answer.token
        return (HAS_LEADER, ("token", self._token))

    def _denied(self, code: grpc.StatusCode, details: str) -> ElasticError | None:
        who = f"user {self._access.username!r}" if self._access.username else "no user name"
        login = any(words in details for words in LOGIN_NEEDED)
        if login or code in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}:
            return NotAuthorized(
                f"etcd refuses {who}: {details}; give the store a user and password that may "
                f"read and write its prefix"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return StoreError(
                f"{self.endpoints[self._asked]} does not know etcd's v3 methods ({details}); name "
                f"the client address of an etcd server, usually port 2379"
            )
        return None


async def _call(
    channel: grpc.aio.Channel,
    method: Method[Answer],
    request: Any,
    timeout_s: float,
    metadata: tuple[tuple[str, str], ...],
) -> Answer:
    call: Any = channel.unary_unary(
        method.path,
        request_serializer=type(request).SerializeToString,
        response_deserializer=method.parse,
    )
    answer: Answer = await call(request, timeout=timeout_s, metadata=metadata)
    return answer
