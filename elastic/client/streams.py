"""Streams of the coordinator that outlive it: opened anew when they break, until a limit.

Rule: a stream is read by one thread and may be closed by any. It ends when what it tells of is
over, when it is closed, or with one of our errors; a coordinator that is away only delays it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import grpc

from elastic.client.endpoints import (
    PAUSE_S_MIN,
    Endpoints,
    as_our_error,
    jittered,
    longer,
)
from elastic.core.view import JobView
from elastic.core.world import ENDED, JobId, WorkerId
from elastic.errors import ElasticError, Unavailable
from elastic.runtime.clock import Clock
from elastic.runtime.rpc import open_blocking_channel
from elastic.wire.codec_jobs import (
    JobEvent,
    LogChunk,
    job_event_from_proto,
    log_chunk_from_proto,
)
from elastic.wire.generated.elastic.v1 import jobs_pb2, jobs_pb2_grpc

T = TypeVar("T")
OnOutage = Callable[[float], None]
"""Called with the seconds since the coordinator fell silent, at each attempt that fails; with
0.0 when it answers again."""

STREAM_TIMEOUT_S = 24 * 3600.0
"""Deadline of one call; the stream goes on with the next one."""
STEADY_S = 5.0
"""A call that lasted so long had reached the coordinator, also if it brought nothing."""
AGENTS_RETURN_S = 15.0
"""Agents are back this long after the coordinator, or their nodes are lost."""
REMARK = "[elastic] "
"""Begins what the coordinator says in place of a worker's output."""
NOT_AT_HAND = REMARK + "output of "


class Again(Exception):
    """The stream stands, but tells too little: open it anew after a pause."""


class Stream(Generic[T]):
    """An iterator over what a server sends, over as many calls as it takes.

    Example:
        >>> with client.watch("digits") as events:  # doctest: +SKIP
        ...     for event in events:
        ...         print(event)
    """

    def __init__(
        self,
        endpoints: Endpoints,
        source: WatchSource | LogSource,
        *,
        clock: Clock,
        on_outage: OnOutage | None = None,
        limit_s: float,
    ) -> None:
        """Open nothing yet.

        Args:
            endpoints: where.
            source: which call, and what its messages mean.
            clock: measures outages.
            on_outage: told of them, in the thread that reads.
            limit_s: the longest outage; 0 lets the first one be an error.
        """
        self._endpoints = endpoints
        self._source: Any = source
        self._clock = clock
        self._on_outage = on_outage or (lambda seconds: None)
        self._limit_s = limit_s
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._endpoint = ""
        self._attempts = 0
        self._opened_ns = 0
        self._out_since_ns: int | None = None
        self._pause_s = PAUSE_S_MIN

    def __enter__(self) -> Stream[T]:
        """Return the stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __iter__(self) -> Iterator[T]:
        """Return the stream itself: what was read is gone."""
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
        """End the stream; whoever reads it sees its end."""
        self._closed.set()
        self._drop()

    def _is_closed(self) -> bool:
        return self._closed.is_set() or self._endpoints.closed.is_set()

    def _read(self) -> Any:
        """Return the next message of the call, opened if there is none."""
        call = self._call
        if call is None:
            order = self._endpoints.order()
            self._endpoint = order[self._attempts % len(order)]
            channel = open_blocking_channel(self._endpoint)
            self._source.opened(self._attempts)
            call = self._source.start(
                channel, timeout=STREAM_TIMEOUT_S, metadata=self._endpoints.metadata
            )
            with self._lock:
                self._channel, self._call = channel, call
            self._opened_ns = self._clock.monotonic_ns()
            if self._is_closed():  # Closed meanwhile, by a thread that could not see this call.
                self._drop()
                raise ValueError("closed")
        return next(call)

    def _take(self, message: Any) -> T | None:
        """Turn a message into an item, None if there is nothing new in it."""
        try:
            item: T | None = self._source.decode(message, self._clock.monotonic_ns())
        except Again:
            self._drop()
            self._wait_out(Unavailable("the agents are not back yet"), quietly=True)
            return None
        if self._out_since_ns is not None:
            self._out_since_ns, self._pause_s = None, PAUSE_S_MIN
            self._on_outage(0.0)
        self._attempts = 0
        self._endpoints.answered(self._endpoint)
        return item

    def _wait_out(self, error: ElasticError, *, quietly: bool = False) -> None:
        """Pause before the next attempt, or raise if there is to be none."""
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._opened_ns > STEADY_S * 1e9:
            self._out_since_ns, self._pause_s = None, PAUSE_S_MIN
        if self._out_since_ns is None:
            self._out_since_ns = now_ns
        out_s = (now_ns - self._out_since_ns) / 1e9
        self._attempts += 1
        tried_all = self._attempts >= len(self._endpoints.names)
        never = not self._endpoints.in_touch and tried_all
        if not isinstance(error, Unavailable):
            raise error
        if never or out_s >= self._limit_s:
            waited = f"for {out_s:.0f} s; " if out_s >= 1 else ""
            raise self._endpoints.unreachable(error, waited) from error
        if not quietly:
            self._on_outage(out_s)
        self._closed.wait(min(jittered(self._pause_s), self._limit_s - out_s))
        self._pause_s = longer(self._pause_s)

    def _drop(self) -> None:
        """End the call, if there is one."""
        with self._lock:
            channel, call = self._channel, self._call
            self._channel = self._call = None
        if call is not None:
            call.cancel()
        if channel is not None:
            channel.close()


class WatchSource:
    """What happens to a job; once the job is known, it is asked for by its id.

    Attributes:
        is_complete: whether the job's end was told, so that the stream may end.
    """

    def __init__(self, job: str) -> None:
        """Watch the job of this id or name."""
        self.job = job
        self.is_complete = False

    def opened(self, attempt: int) -> None:
        """Take note of a new call: it begins with a snapshot, whatever came before."""

    def start(self, channel: grpc.Channel, **options: Any) -> Any:
        """Begin the call."""
        return jobs_pb2_grpc.JobsStub(channel).Watch(
            jobs_pb2.WatchRequest(job=self.job), **options
        )

    def decode(self, message: jobs_pb2.JobEvent, now_ns: int) -> JobEvent:
        """Return the snapshot or the note; names may be used again, ids are not."""
        event = job_event_from_proto(message, now_ns)
        if isinstance(event, JobView):
            self.job = JobId(event.record.spec.job_id)
            self.is_complete = event.record.phase in ENDED
        return event


class LogSource:
    """Output of workers, each character once also over several calls.

    A call that takes up an earlier one asks for all output again and leaves out as much of each
    worker's as has been seen. When only a tail was asked for, that number is not known: then
    output during an outage is left out, and a remark says so.

    Attributes:
        is_complete: True: the coordinator alone knows when no more output will come.
    """

    def __init__(self, job: str, *, ranks: tuple[int, ...], tail: int, follow: bool) -> None:
        """Ask for the output of these ranks, of all if there are none."""
        self.is_complete = True
        self._job = job
        self._ranks = ranks
        self._tail = tail
        self._follow = follow
        self._seen: dict[WorkerId, int] = {}
        self._unseen: dict[WorkerId, int] = {}
        self._resumed_ns: int | None = None
        self._is_resumed = False
        self._owes_remark = False

    def opened(self, attempt: int) -> None:
        """Prepare for a call that begins anew."""
        if self._seen or attempt:
            self._is_resumed = bool(self._seen)
            self._owes_remark = self._is_resumed and self._tail >= 0
        if self._is_resumed and self._tail < 0:
            self._unseen = dict(self._seen)

    def start(self, channel: grpc.Channel, **options: Any) -> Any:
        """Begin the call."""
        tail = 0 if self._is_resumed and self._tail >= 0 else self._tail
        request = jobs_pb2.LogsRequest(
            job=self._job, ranks=self._ranks, tail_lines=tail, follow=self._follow
        )
        return jobs_pb2_grpc.JobsStub(channel).Logs(request, **options)

    def decode(self, message: jobs_pb2.LogChunk, now_ns: int) -> LogChunk | None:
        """Return what was not seen before, None if all was.

        Raises:
            Again: an agent is not connected to the new coordinator yet; asked too early, it
                would be asked for less than was missed.
        """
        chunk = log_chunk_from_proto(message)
        worker_id, text = chunk.worker_id, chunk.text
        if text.startswith(REMARK):
            return self._take_remark(chunk, now_ns)
        self._seen[worker_id] = self._seen.get(worker_id, 0) + len(text)
        known = min(self._unseen.get(worker_id, 0), len(text))
        if known:
            self._unseen[worker_id] -= known
            self._seen[worker_id] -= known
            text = text[known:]
        if self._owes_remark:
            self._owes_remark = False
            text = f"{REMARK}output may be missing here: the coordinator was away\n{text}"
        return None if not text else _with_text(chunk, text)

    def _take_remark(self, chunk: LogChunk, now_ns: int) -> LogChunk | None:
        if not (self._is_resumed and chunk.text.startswith(NOT_AT_HAND)):
            return chunk
        if self._resumed_ns is None:
            self._resumed_ns = now_ns
        if now_ns - self._resumed_ns < AGENTS_RETURN_S * 1e9:
            raise Again
        self._unseen.pop(chunk.worker_id, None)
        self._resumed_ns = None
        return chunk


def _with_text(chunk: LogChunk, text: str) -> LogChunk:
    return LogChunk(chunk.worker_id, chunk.rank, chunk.generation, chunk.node_id, text)
