"""Calls to a coordinator with several addresses, one of which leads.

Rule: a call returns an answer or raises one of our errors, never a gRPC status. Every call is
idempotent, so after a failed address the next one is tried, or the one that a standby points to.
Addresses learned from answers are tried after those of the user.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from elastic.errors import (
    CoordinatorUnreachable,
    CoordinatorUntrusted,
    ElasticError,
    NotLeading,
    Unavailable,
    UsageError,
)
from elastic.runtime.access import Access
from elastic.runtime.clock import Clock
from elastic.runtime.rpc import (
    COORDINATORS_KEY,
    FRESH_KEY,
    Metadata,
    call_metadata,
    error_from_rpc,
    open_blocking_channel,
    plain_addresses,
)

TIMEOUT_S = 10.0
"""How long to retry a coordinator that is starting, or a standby that is taking over."""
PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 2.0
TAKEOVER_PAUSE_S_MAX = 0.5
"""Between two attempts while a standby is about to take over."""
LAST_ERROR = "last error: "

Start = Callable[[grpc.Channel], Any]
"""Makes the callable of a method on this channel."""


def longer(pause_s: float) -> float:
    """Return the pause after this one; it doubles up to a limit."""
    return min(2 * pause_s, PAUSE_S_MAX)


def jittered(pause_s: float) -> float:
    """Return between half of the pause and all of it, so that clients do not retry in sync."""
    return pause_s * random.uniform(0.5, 1.0)


def as_our_error(error: BaseException, endpoint: str) -> ElasticError:
    """Return our error for a failed call; of gRPC's chain of causes only the last one is kept."""
    ours = error_from_rpc(error, endpoint)
    if isinstance(ours, CoordinatorUntrusted):
        return ours
    if isinstance(ours, CoordinatorUnreachable) and LAST_ERROR in ours.detail:
        return CoordinatorUnreachable(
            endpoint, ours.detail.rpartition(LAST_ERROR)[2].removeprefix("UNKNOWN: ")
        )
    return ours


def with_reason(error: Unavailable, failures: Mapping[str, Unavailable]) -> Unavailable:
    """Return a standby's error, with the reason why its leader could not be reached."""
    if not isinstance(error, NotLeading):
        return error
    why = failures.get(error.leader)
    if not isinstance(why, CoordinatorUnreachable):
        return error
    text = f"{error}, which cannot be reached from here: {why.detail}"
    return NotLeading(text, leader=error.leader, term=error.term)


@dataclass
class _CountedChannel:
    """A channel and how many calls are on it; a retired one is closed by the last of them."""

    endpoint: str
    channel: grpc.Channel
    calls: int = 0
    retired: bool = False


class Endpoints:
    """The addresses of one cluster's coordinator; may be used from several threads.

    Attributes:
        names: "host:port" each, in the order in which they are tried at first.
        learned: others that a coordinator named in its last answer.
        access: credentials for new connections.
        in_touch: whether a coordinator has answered before.
        patience_s: how long to retry without any answer, as during a coordinator's restart.
        closed: set by `close`; pauses between two attempts wait on it.
    """

    def __init__(self, names: tuple[str, ...], access: Access, clock: Clock) -> None:
        self.names = names
        self.learned: tuple[str, ...] = ()
        self.access = access
        self._metadata = call_metadata(access.current_token())
        self.in_touch = False
        self.patience_s = 0.0
        self.closed = threading.Event()
        self._clock = clock
        self._leader = ""
        self._lock = threading.Lock()
        self._lines: dict[str, _CountedChannel] = {}

    @property
    def address(self) -> str:
        return ",".join(self.names)

    @property
    def metadata(self) -> Metadata:
        """Return the metadata of every call, with the current token, else the last readable one."""
        # The file may be missing or incomplete now: the coordinator checks the old token.
        with contextlib.suppress(UsageError):
            self._metadata = call_metadata(self.access.current_token())
        return self._metadata

    def order(self) -> tuple[str, ...]:
        """Return the addresses, the one that leads as far as is known first."""
        known = (*self.names, *self.learned)
        others = tuple(name for name in known if name != self._leader)
        return (self._leader, *others) if self._leader else others

    def answered(self, endpoint: str) -> None:
        self.in_touch = True
        self._leader = endpoint

    def learn(self, metadata: Any) -> None:
        """Record the coordinators' addresses from an answer's initial metadata."""
        for key, value in metadata or ():
            if key == COORDINATORS_KEY:
                addresses = plain_addresses(str(value))
                self.learned = tuple(name for name in addresses if name not in self.names)

    def pointed(self, error: BaseException) -> bool:
        """Record the leader that a standby points to; return whether that address is new."""
        if not isinstance(error, NotLeading) or not error.leader:
            return False
        self.in_touch = True
        is_news, self._leader = error.leader != self._leader, error.leader
        return is_news

    def call(self, start: Start, request: Any, *, timeout_s: float, stale_ok: bool = False) -> Any:
        """Make one call, at one address after the other until one answers.

        Args:
            start: the method.
            request: its message.
            timeout_s: deadline of each attempt.
            stale_ok: if no leader answers, a standby may, from the store.

        Raises:
            CoordinatorUnreachable: no address answers, and the time for retries is over.
            Unavailable: one answers, but does not lead yet, and the time for retries is over.
            ElasticError: the coordinator refused.
        """
        started_ns = self._clock.monotonic_ns()
        pause_s = PAUSE_S_MIN
        while True:
            failures: dict[str, Unavailable] = {}
            tried: dict[str, None] = {}
            while todo := [name for name in self.order() if name not in tried]:
                endpoint = todo[0]
                tried[endpoint] = None
                try:
                    answer = self._call_one(endpoint, start, request, timeout_s)
                except Unavailable as error:
                    failures[endpoint] = error
                    self.pointed(error)
                else:
                    self.answered(endpoint)
                    return answer
            errors = list(failures.values())
            not_yet = [e for e in errors if not isinstance(e, CoordinatorUnreachable)]
            if stale_ok and any(isinstance(error, NotLeading) for error in not_yet):
                with contextlib.suppress(Unavailable):
                    return self._call_standby(tuple(tried), start, request, timeout_s)
            untrusted = any(isinstance(error, CoordinatorUntrusted) for error in errors)
            patience_s = max(TIMEOUT_S if not_yet else 0.0, 0.0 if untrusted else self.patience_s)
            if self._clock.monotonic_ns() >= started_ns + round(patience_s * 1e9):
                raise (
                    with_reason(not_yet[-1], failures) if not_yet else self.unreachable(errors[-1])
                )
            if self.closed.wait(jittered(min(pause_s, TAKEOVER_PAUSE_S_MAX))):
                raise errors[-1]
            pause_s = longer(pause_s)

    def _call_standby(
        self, names: tuple[str, ...], start: Start, request: Any, timeout_s: float
    ) -> Any:
        """Call the first address that answers, leader or not; raise the last error if none."""
        failure: Unavailable = Unavailable("no coordinator address was given")
        for name in names:
            try:
                return self._call_one(name, start, request, timeout_s, fresh=False)
            except Unavailable as error:
                failure = error
        raise failure

    def unreachable(self, last: Unavailable, more: str = "") -> CoordinatorUnreachable:
        """Return the error that names all addresses and why the last one failed."""
        if isinstance(last, CoordinatorUntrusted):
            return last
        detail = last.detail if isinstance(last, CoordinatorUnreachable) else str(last)
        return CoordinatorUnreachable(self.address, f"{more}{detail}")

    def close(self) -> None:
        """Close every channel; calls in progress fail."""
        self.closed.set()
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.channel.close()

    def _call_one(
        self, endpoint: str, start: Start, request: Any, timeout_s: float, *, fresh: bool = True
    ) -> Any:
        with self._line(endpoint) as line:
            try:
                method = start(line.channel)
                flags = ((FRESH_KEY, "1"),) if fresh else ()  # Only the leader may answer.
                answer, call = method.with_call(
                    request, timeout=timeout_s, metadata=(*self.metadata, *flags)
                )
                self.learn(call.initial_metadata())
                return answer
            except (grpc.RpcError, ValueError) as error:
                if self.closed.is_set():
                    raise UsageError("this client was closed; make a new Client") from error
                ours = as_our_error(error, endpoint)
                if isinstance(ours, CoordinatorUnreachable):
                    # A new channel connects at once; this one would wait for its back-off.
                    self._retire(line)
                raise ours from error

    @contextmanager
    def _line(self, endpoint: str) -> Iterator[_CountedChannel]:
        """Lend the channel to an address, opened if there is none."""
        with self._lock:
            if self.closed.is_set():
                raise UsageError("this client was closed; make a new Client")
            line = self._lines.get(endpoint)
            if line is None:
                line = self._lines[endpoint] = _CountedChannel(
                    endpoint, open_blocking_channel(endpoint, self.access)
                )
            line.calls += 1
        try:
            yield line
        finally:
            with self._lock:
                line.calls -= 1
                over = line.retired and not line.calls
            if over:
                line.channel.close()

    def _retire(self, line: _CountedChannel) -> None:
        """Make later calls use a new channel; calls of other threads on this one continue."""
        with self._lock:
            line.retired = True
            if self._lines.get(line.endpoint) is line:
                del self._lines[line.endpoint]
