"""A client of the coordinator, for driver scripts and the command line; no event loop needed.

Rule: every call has a deadline and may be repeated, and every failure is one of our errors.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from elastic.client.endpoints import Endpoints
from elastic.client.sources import EventSource, JobSource, LogSource
from elastic.client.streams import OnOutage, ResumingStream, StreamSource
from elastic.core.config import JobSpec
from elastic.core.facts import JobId, WorkerId
from elastic.core.records import JobRecord
from elastic.core.view import JobView
from elastic.errors import NameTaken, NotFound
from elastic.runtime.access import Access, as_access
from elastic.runtime.clock import Clock, SystemClock
from elastic.runtime.rpc import NO_ACCESS, parse_endpoints
from elastic.runtime.services import caller_of
from elastic.wire.codec_jobs import (
    ClusterStatus,
    JobEvent,
    LogChunk,
    TimedNote,
    job_from_proto,
    status_from_proto,
    submit_request,
)
from elastic.wire.generated.elastic.v1 import jobs_pb2

T = TypeVar("T")

METHODS = {
    method.name: method
    for service in jobs_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
READ_TIMEOUT_S = 10.0
CHANGE_TIMEOUT_S = 25.0
"""Longer than a coordinator's own timeout for a request."""
OUTAGE_LIMIT_S = 300.0
"""Followers give up a coordinator that does not answer for longer; training continues."""

ID_CHARS = "abcdefghijklmnopqrstuvwxyz234567"
ID_LENGTH = 6


class Client:
    """A connection to a cluster; may be used from several threads.

    `job` is an id, a unique beginning of one, or a name (of the job that has not ended, else of
    the one submitted last). What fails raises an `ElasticError`, also in the iterators that some
    methods return: `NotFound` for a job or node that is not there, `Unavailable` without an answer.

    Attributes:
        call_timeout_s: upper limit of each call's timeout; None for the calls' own timeouts.

    Example:
        >>> with Client("127.0.0.1:7070") as client:  # doctest: +SKIP
        ...     print(client.get("digits").reason)
    """

    def __init__(self, address: str | Sequence[str], access: Access | str = NO_ACCESS) -> None:
        """Open no connection yet.

        Args:
            address: "host:port", several of them with commas, or a list.
            access: credentials for the coordinator; a string is a bare token.

        Raises:
            ConfigError: an address is not valid.
        """
        text = address if isinstance(address, str) else ",".join(address)
        self.call_timeout_s: float | None = None
        self._clock: Clock = SystemClock()
        self._endpoints = Endpoints(parse_endpoints(text), as_access(access), self._clock)
        self._streams: weakref.WeakSet[ResumingStream[Any]] = weakref.WeakSet()
        self._lock = threading.Lock()

    def wait_for_answers(self, patience_s: float) -> None:
        """Let each call retry for so long without an answer, as during a coordinator's restart."""
        self._endpoints.patience_s = patience_s

    @property
    def address(self) -> str:
        return self._endpoints.address

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; streams end."""
        self._endpoints.close()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    # ------------------------------------------------------------ jobs

    def submit(self, spec: JobSpec) -> JobId:
        """Submit a job; it is durable when this returns.

        A spec without an id gets one here, so that a retry after a lost reply is recognised and
        nothing is submitted twice.

        Raises:
            NameTaken: a job of this name has not ended.
            UsageError: the cluster can never run this, or the spec cannot be serialised.
        """
        job_id = spec.job_id or new_job_id()
        request = submit_request(replace(spec, job_id=job_id))
        try:
            self._call("Submit", request, timeout_s=CHANGE_TIMEOUT_S)
        except NameTaken:
            if not self._is_there(job_id, spec.name):
                raise
        return job_id

    def stop(self, job: str, reason: str = "", *, now: bool = False) -> None:
        """Stop a job: one that can be saved is saved first, and leaves at a boundary.

        Args:
            job: id or name.
            reason: shown with it.
            now: stop without a checkpoint; scripts are not asked either.

        Raises:
            Refused: it has ended already.
        """
        request = jobs_pb2.StopJobRequest(job=job, reason=reason, now=now)
        self._call("Stop", request, timeout_s=CHANGE_TIMEOUT_S)

    def checkpoint(self, job: str) -> int:
        """Request a checkpoint of a job now; does not wait until it is recorded.

        Raises:
            Refused: it can take none now: it has ended, does not train, or has no run directory.
        """
        request = jobs_pb2.CheckpointRequest(job=job)
        return int(self._call("Checkpoint", request, timeout_s=CHANGE_TIMEOUT_S).request)

    def pause(self, job: str) -> None:
        """Pause a job: it releases its workers after a checkpoint; does not wait for that.

        Raises:
            Refused: it has ended, or has no run directory to continue from.
        """
        self._call("Pause", jobs_pb2.PauseRequest(job=job), timeout_s=CHANGE_TIMEOUT_S)

    def resume(self, job: str) -> None:
        """Resume a paused job.

        Raises:
            Refused: it has ended.
        """
        self._call("Resume", jobs_pb2.ResumeRequest(job=job), timeout_s=CHANGE_TIMEOUT_S)

    def scale(self, job: str, *, min_workers: int = 0, max_workers: int = 0) -> None:
        """Change the bounds of a job's group, which follows at a boundary; 0 keeps a bound.

        Raises:
            Refused: it has ended.
            UsageError: it cannot have these bounds.
        """
        request = jobs_pb2.ScaleRequest(job=job, min_workers=min_workers, max_workers=max_workers)
        self._call("Scale", request, timeout_s=CHANGE_TIMEOUT_S)

    def get(self, job: str, *, stale_ok: bool = False) -> JobView:
        """Return the present state of a job; times are on this process's monotonic clock.

        Args:
            job: id or name.
            stale_ok: while there is no leader, a standby may answer; the job's reason states it.
        """
        proto = self._call("Get", jobs_pb2.GetJobRequest(job=job), stale_ok=stale_ok)
        return job_from_proto(proto, self._clock.monotonic_ns())

    def record_of(self, job: str) -> JobRecord | None:
        """Return the coordinator's record of a job, None if it does not know it."""
        try:
            return self.get(job).record
        except NotFound:
            return None

    def list(self, *, include_ended: bool = True, stale_ok: bool = False) -> tuple[JobView, ...]:
        """Return all jobs by order of submission.

        Args:
            include_ended: ended ones too, as far as the coordinator remembers them.
            stale_ok: as for `get`.
        """
        request = jobs_pb2.ListJobsRequest(include_ended=include_ended)
        proto = self._call("List", request, stale_ok=stale_ok)
        now_ns = self._clock.monotonic_ns()
        return tuple(job_from_proto(job, now_ns) for job in proto.jobs)

    def watch(
        self, job: str, *, on_outage: OnOutage | None = None, limit_s: float = OUTAGE_LIMIT_S
    ) -> ResumingStream[JobEvent]:
        """Follow a job: a snapshot, then notes, and a snapshot after each change.

        Ends when the job has ended and its workers are gone. After an outage of the coordinator it
        continues; changes meanwhile are in the next snapshot only.

        Args:
            job: id or name.
            on_outage: called during outages, in the thread that reads.
            limit_s: the longest tolerated outage.
        """
        return self._stream(JobSource(job), limit_s, on_outage)

    def events(self, job: str, *, follow: bool = False) -> ResumingStream[TimedNote]:
        """Read the events of a job, oldest first, as far as the coordinator remembers."""
        return self._stream(EventSource(job, follow=follow), OUTAGE_LIMIT_S if follow else 0.0)

    def profile(self, job: str, *, rank: int, seconds: float) -> str:
        """Request that a worker samples its stacks, and writes them into the run directory.

        Returns:
            The name of the file, which exists after that time.

        Raises:
            NotFound: also if no worker has this rank.
            Refused: the job has no run directory.
        """
        request = jobs_pb2.ProfileRequest(job=job, rank=rank, seconds=seconds)
        return str(self._call("Profile", request, timeout_s=CHANGE_TIMEOUT_S).name)

    def stacks(self, job: str, *, ranks: Sequence[int] = ()) -> tuple[WorkerId, ...]:
        """Request that a job's workers write the stacks of all their threads to their output."""
        request = jobs_pb2.StacksRequest(job=job, ranks=ranks)
        answer = self._call("Stacks", request, timeout_s=CHANGE_TIMEOUT_S)
        return tuple(WorkerId(worker) for worker in answer.workers)

    def logs(
        self, job: str, *, ranks: Sequence[int] = (), tail: int = -1, follow: bool = False
    ) -> ResumingStream[LogChunk]:
        """Read the output of a job's workers.

        Args:
            job: id or name.
            ranks: in the newest group; empty for all workers.
            tail: lines of existing output, for each worker; -1 for all.
            follow: continue until the job has ended, also with the output of later workers.
        """
        source = LogSource(job, ranks=tuple(ranks), tail=tail, follow=follow)
        limit_s = OUTAGE_LIMIT_S if follow else 0.0
        return self._stream(source, limit_s)

    # ------------------------------------------------------------ the cluster

    def status(self, *, stale_ok: bool = False) -> ClusterStatus:
        """Return the coordinator, its nodes and its jobs.

        Args:
            stale_ok: while there is no leader, a standby may answer; `standby` states it.
        """
        proto = self._call("Status", jobs_pb2.StatusRequest(), stale_ok=stale_ok)
        return status_from_proto(proto, self._clock.monotonic_ns())

    def drain(self, node: str, *, timeout_s: float = 30.0, reason: str = "") -> float:
        """Drain a node: its workers leave at a boundary, then its agent ends.

        Args:
            node: its id.
            timeout_s: until it must be gone. Workers still there in the last quarter of it, 5 s at
                most, are ended at once; 0 ends them immediately.
            reason: for people.

        Returns:
            Seconds until the node must be gone: fewer if it drains already, and sooner.

        Raises:
            Refused: it is not connected.
        """
        request = jobs_pb2.DrainRequest(node=node, timeout_s=timeout_s, reason=reason)
        answer = self._call("Drain", request, timeout_s=CHANGE_TIMEOUT_S)
        return float(answer.timeout_s)

    def cordon(self, node: str, *, cordoned: bool = True, reason: str = "") -> None:
        """Cordon or uncordon a node: whether new workers may start; existing ones stay."""
        request = jobs_pb2.CordonRequest(node=node, cordoned=cordoned, reason=reason)
        self._call("Cordon", request, timeout_s=CHANGE_TIMEOUT_S)

    # ------------------------------------------------------------ calls

    def _call(
        self,
        method: str,
        request: object,
        *,
        timeout_s: float = READ_TIMEOUT_S,
        stale_ok: bool = False,
    ) -> Any:
        def start(channel: grpc.Channel) -> Any:
            return caller_of(channel, METHODS[method])

        if self.call_timeout_s is not None:
            timeout_s = min(timeout_s, self.call_timeout_s)
        return self._endpoints.call(start, request, timeout_s=timeout_s, stale_ok=stale_ok)

    def _stream(
        self, source: StreamSource[T], limit_s: float, on_outage: OnOutage | None = None
    ) -> ResumingStream[T]:
        stream = ResumingStream(
            self._endpoints, source, clock=self._clock, limit_s=limit_s, on_outage=on_outage
        )
        with self._lock:
            self._streams.add(stream)
        return stream

    def _is_there(self, job_id: JobId, name: str) -> bool:
        """Return whether the submitted job is known, because only the reply was lost."""
        try:
            spec = self.get(job_id).record.spec
        except NotFound:
            return False
        return (spec.job_id, spec.name) == (job_id, name)


def new_job_id() -> JobId:
    return JobId("j-" + "".join(secrets.choice(ID_CHARS) for _ in range(ID_LENGTH)))
