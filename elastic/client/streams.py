"""Streams from the coordinator that survive its outages: reopened when they break, up to a limit.

Rule: a stream is read by one thread and may be closed by any. It ends when its source is complete,
when it is closed, or with one of our errors; an outage of the coordinator only delays it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor

from elastic.client.endpoints import PAUSE_S_MIN, Endpoints, as_our_error, jittered, longer
from elastic.errors import ElasticError, Unavailable
from elastic.runtime.clock import Clock
from elastic.runtime.rpc import open_blocking_channel
from elastic.runtime.services import caller_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
OnOutage = Callable[[float], None]
"""Called with the seconds since the last answer, at each failed attempt; with 0.0 when the
coordinator answers again. In the thread that reads the stream."""

STREAM_TIMEOUT_S = 24 * 3600.0
"""Deadline of one call; the stream continues with the next one."""
STEADY_S = 5.0
"""A call that lasted so long had reached the coordinator, even without a message."""


class ReopenStream(Exception):
    """An open stream would miss messages: reopen it after a pause."""


class StreamSource(Protocol[T_co]):
    """The call that a stream makes, and the decoder of its messages.

    Attributes:
        method: that is called.
        request: its message, of the next call.
        is_complete: whether the server's end of the call ends the stream; else it is an outage.
    """

    method: MethodDescriptor
    request: Any
    is_complete: bool

    def opened(self) -> None:
        """Prepare for a new call that is about to start."""
        ...

    def decode(self, message: Any, now_ns: int) -> T_co | None:
        """Return the item of a message, None if it has nothing new.

        Raises:
            ReopenStream: see there.
        """
        ...


class ResumingStream(Generic[T]):
    """An iterator over the items that a server sends, over as many calls as necessary.

    Example:
        >>> with client.watch("digits") as events:  # doctest: +SKIP
        ...     for event in events:
        ...         print(event)
    """

    def __init__(
        self,
        endpoints: Endpoints,
        source: StreamSource[T],
        *,
        clock: Clock,
        limit_s: float,
        on_outage: OnOutage | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            endpoints: of the coordinators.
            source: makes the calls.
            clock: measures outages.
            limit_s: the longest outage; with 0 each address is tried once.
            on_outage: called during outages.
        """
        self._endpoints = endpoints
        self._source = source
        self._clock = clock
        self._limit_s = limit_s
        self._on_outage = on_outage or (lambda seconds: None)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._endpoint = ""
        self._attempts = 0
        self._opened_ns = 0
        self._is_new = True
        self._out_since_ns: int | None = None
        self._pause_s = PAUSE_S_MIN

    def __enter__(self) -> ResumingStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        """Return the stream itself: it cannot be read twice."""
        return self

    def __next__(self) -> T:
        """Wait for the next item.

        Raises:
            StopIteration: the stream is over, or was closed.
            CoordinatorUnreachable: the outage lasted longer than the limit.
            ElasticError: the coordinator refused.
        """
        while not self._is_closed():
            try:
                message = self._read()
            except StopIteration:
                self._drop()
                if self._source.is_complete:
                    break
                self._wait_out(Unavailable("the coordinator ended the stream early"))
            except (grpc.RpcError, ValueError) as error:
                self._drop()
                if not self._is_closed():
                    self._wait_out(as_our_error(error, self._endpoint))
            else:
                item = self._take(message)
                if item is not None:
                    return item
        self.close()
        raise StopIteration

    def close(self) -> None:
        """End the stream, also for the thread that reads it."""
        self._closed.set()
        self._drop()

    def _is_closed(self) -> bool:
        return self._closed.is_set() or self._endpoints.closed.is_set()

    def _read(self) -> Any:
        """Return the next message of the call; start a call if there is none."""
        call = self._call
        if call is None:
            order = self._endpoints.order()
            self._endpoint = order[self._attempts % len(order)]
            self._source.opened()
            channel = open_blocking_channel(self._endpoint, self._endpoints.access)
            options = {"timeout": STREAM_TIMEOUT_S, "metadata": self._endpoints.metadata}
            call = caller_of(channel, self._source.method)(self._source.request, **options)
            with self._lock:
                self._channel, self._call = channel, call
            self._opened_ns, self._is_new = self._clock.monotonic_ns(), True
            if self._is_closed():  # By a thread that did not see this call yet.
                self._drop()
        message = next(call)
        if self._is_new:
            self._is_new = False
            self._endpoints.learn(call.initial_metadata())
        return message

    def _take(self, message: Any) -> T | None:
        """Turn a message into an item, None if there is nothing new in it."""
        try:
            item = self._source.decode(message, self._clock.monotonic_ns())
        except ReopenStream as again:
            self._drop()
            self._wait_out(Unavailable(str(again)), quietly=True)
            return None
        if self._out_since_ns is not None:
            self._over()
            self._on_outage(0.0)
        self._attempts = 0
        self._endpoints.answered(self._endpoint)
        return item

    def _wait_out(self, error: ElasticError, *, quietly: bool = False) -> None:
        """Pause before the next attempt, or raise if the limit is reached."""
        if not isinstance(error, Unavailable):
            raise error
        if self._endpoints.pointed(error):
            self._attempts = 0
            return  # The leader is known: no pause.
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._opened_ns > STEADY_S * 1e9:
            self._over()
        if self._out_since_ns is None:
            self._out_since_ns = now_ns
        out_s = (now_ns - self._out_since_ns) / 1e9
        self._attempts += 1
        is_hopeless = not self._endpoints.in_touch or out_s >= self._limit_s
        if is_hopeless and self._attempts >= len(self._endpoints.order()):
            waited = f"for {out_s:.0f} s: " if out_s >= 1 else ""
            raise self._endpoints.unreachable(error, waited) from error
        if not quietly:
            self._on_outage(out_s)
        self._closed.wait(max(0.0, min(jittered(self._pause_s), self._limit_s - out_s)))
        self._pause_s = longer(self._pause_s)

    def _over(self) -> None:
        self._out_since_ns, self._pause_s = None, PAUSE_S_MIN

    def _drop(self) -> None:
        """End the call, if there is one."""
        with self._lock:
            channel, call = self._channel, self._call
            self._channel = self._call = None
        if call is not None:
            call.cancel()
        if channel is not None:
            channel.close()
