"""What users and operators see: jobs, what happens to them, the cluster, output of workers.

Rule: a moment on a monotonic clock never leaves its process; an age does, and the receiver counts
it back from its own clock. A job that is shown carries no payload: it may be large, and only
workers need it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.core.config import JobSpec
from elastic.core.events.coordinator import Cordon
from elastic.core.events.shared import Note
from elastic.core.view import ClusterView, JobView, NodeView
from elastic.core.world import Generation, NodeId, WorkerId
from elastic.errors import PeerError
from elastic.wire.codec import MessageCodec
from elastic.wire.envelope import Envelope
from elastic.wire.generated.elastic.v1 import facts_pb2, jobs_pb2


@dataclass(frozen=True)
class TimedNote:
    """A note with the wall clock of the coordinator, nanoseconds since 1970."""

    note: Note
    unix_ns: int


@dataclass(frozen=True)
class LogChunk:
    """Output of one worker.

    Attributes:
        rank: of the worker when it printed this, -1 before its first group.
        generation: of its group then.
        unix_ns: its agent's wall clock at that moment, 0 if not known.
    """

    worker_id: WorkerId
    rank: int
    generation: Generation
    node_id: NodeId
    text: str
    unix_ns: int = 0


@dataclass(frozen=True)
class ClusterStatus:
    """A coordinator and all that it sees.

    Attributes:
        version: of elastic-torch.
        protocol: "major.minor".
        store: the membership store, without credentials.
        uptime_ns: how long the coordinator has been in office.
        standby: "" from the coordinator that leads; from another one how old this is, and who
            leads. It shows jobs and cordons only, as the store holds them.
        coordinators: "host:port" of all that share the store, () if it has one only.
    """

    coordinator: str
    version: str
    protocol: str
    store: str
    uptime_ns: int
    view: ClusterView
    standby: str = ""
    coordinators: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Status:
    """`ClusterStatus` with the view's parts beside the rest, as it travels."""

    coordinator: str
    version: str
    protocol: str
    store: str
    uptime_ns: int
    nodes: tuple[NodeView, ...]
    jobs: tuple[JobView, ...]
    standby: str
    cordons: tuple[Cordon, ...]
    coordinators: tuple[str, ...]


JobEvent = JobView | TimedNote

HIDDEN = "***"
"""Stands for the value of a variable of a job's environment, which may be a password."""

_RENAMED = {"JobView": "Job", "_Status": "ClusterStatus", "since_ns": "age_ns"}
_SPEC = MessageCodec(JobSpec, facts_pb2.JobSpec.DESCRIPTOR)
_JOB = MessageCodec(JobView, jobs_pb2.Job.DESCRIPTOR, _RENAMED)
_LOG_CHUNK = MessageCodec(LogChunk, jobs_pb2.LogChunk.DESCRIPTOR)
_TIMED_NOTE = MessageCodec(TimedNote, jobs_pb2.TimedNote.DESCRIPTOR)
_STATUS = MessageCodec(_Status, jobs_pb2.ClusterStatus.DESCRIPTOR, _RENAMED)
_EVENT: Envelope[JobEvent, jobs_pb2.JobEvent] = Envelope(
    jobs_pb2.JobEvent, (JobView, TimedNote), _RENAMED
)


def submit_request(spec: JobSpec) -> jobs_pb2.SubmitRequest:
    """Return the request that submits a job.

    Raises:
        ConfigError: a value cannot travel (a number out of range, a path that is not Unicode).
    """
    request = jobs_pb2.SubmitRequest()
    request.spec.SetInParent()
    _SPEC.fill(spec, request.spec)
    return request


def spec_of(request: jobs_pb2.SubmitRequest) -> JobSpec:
    """Return what a user wants to run.

    Raises:
        PeerError: there is no specification in the request, or it breaks a rule of `JobSpec`.
    """
    if not request.HasField("spec"):
        raise PeerError("SubmitRequest.spec is missing: expected the specification of a job")
    return _SPEC.read(request.spec)


def job_to_proto(job: JobView, now_ns: int) -> jobs_pb2.Job:
    """Return a job as it is shown at `now_ns`, on the clock that its moments are from."""
    proto = jobs_pb2.Job()
    _JOB.fill(_turned(without_secrets(job), now_ns), proto)
    return proto


def job_from_proto(proto: jobs_pb2.Job, now_ns: int) -> JobView:
    """Return a job; its moments are on the caller's clock, which now says `now_ns`.

    Raises:
        PeerError: the message states what cannot be.
    """
    return _turned(_JOB.read(proto), now_ns)


def job_event_to_proto(event: JobEvent, now_ns: int) -> jobs_pb2.JobEvent:
    """Return a snapshot of a job, or what happened to it, for those who watch."""
    if isinstance(event, JobView):
        return _EVENT.to_proto(_turned(without_secrets(event), now_ns))
    return _EVENT.to_proto(event)


def job_event_from_proto(proto: jobs_pb2.JobEvent, now_ns: int) -> JobEvent:
    """Return a snapshot of a job, or what happened to it.

    Raises:
        PeerError: the message states what cannot be, or neither of the two.
    """
    event = _EVENT.from_proto(proto)
    return _turned(event, now_ns) if isinstance(event, JobView) else event


def timed_note_to_proto(note: TimedNote) -> jobs_pb2.TimedNote:
    """Return what happened to a job."""
    proto = jobs_pb2.TimedNote()
    _TIMED_NOTE.fill(note, proto)
    return proto


def timed_note_from_proto(proto: jobs_pb2.TimedNote) -> TimedNote:
    """Return what happened to a job.

    Raises:
        PeerError: the message states what cannot be.
    """
    return _TIMED_NOTE.read(proto)


def log_chunk_to_proto(chunk: LogChunk) -> jobs_pb2.LogChunk:
    """Return output of a worker for those who follow it."""
    proto = jobs_pb2.LogChunk()
    _LOG_CHUNK.fill(chunk, proto)
    return proto


def log_chunk_from_proto(proto: jobs_pb2.LogChunk) -> LogChunk:
    """Return output of a worker."""
    return _LOG_CHUNK.read(proto)


def status_to_proto(status: ClusterStatus) -> jobs_pb2.ClusterStatus:
    """Return the cluster as it is shown; ages count from the view's own moment."""
    view = status.view
    proto = jobs_pb2.ClusterStatus()
    flat = _Status(
        coordinator=status.coordinator,
        version=status.version,
        protocol=status.protocol,
        store=status.store,
        uptime_ns=status.uptime_ns,
        nodes=tuple(replace(node, since_ns=view.now_ns - node.since_ns) for node in view.nodes),
        jobs=tuple(_turned(without_secrets(job), view.now_ns) for job in view.jobs),
        standby=status.standby,
        cordons=view.cordons,
        coordinators=status.coordinators,
    )
    _STATUS.fill(flat, proto)
    return proto


def status_from_proto(proto: jobs_pb2.ClusterStatus, now_ns: int) -> ClusterStatus:
    """Return the cluster; its moments are on the caller's clock, which now says `now_ns`.

    Raises:
        PeerError: the message states what cannot be.
    """
    flat = _STATUS.read(proto)
    nodes = tuple(replace(node, since_ns=now_ns - node.since_ns) for node in flat.nodes)
    jobs = tuple(_turned(job, now_ns) for job in flat.jobs)
    return ClusterStatus(
        coordinator=flat.coordinator,
        version=flat.version,
        protocol=flat.protocol,
        store=flat.store,
        uptime_ns=flat.uptime_ns,
        view=ClusterView(now_ns=now_ns, nodes=nodes, jobs=jobs, cordons=flat.cordons),
        standby=flat.standby,
        coordinators=flat.coordinators,
    )


def without_secrets(job: JobView) -> JobView:
    """Return a job as it is shown: without its code, the values of its environment, its key.

    Nor with the workers that it had: there may be thousands, and whoever needs them has the record.
    """
    record = job.record
    if record.former:
        record = replace(record, former=())
    entry, group = record.spec.entry, record.group
    if entry.payload or entry.env:
        shown = tuple((name, HIDDEN) for name, _ in entry.env)
        bare = replace(entry, payload=b"", env=shown)
        record = replace(record, spec=replace(record.spec, entry=bare))
    if group is not None and group.key:
        record = replace(record, group=replace(group, key=""))
    return job if record is job.record else replace(job, record=record)


def _turned(job: JobView, now_ns: int) -> JobView:
    """Turn moments into ages; since both are `now` minus the other, also ages into moments."""
    return replace(
        job,
        since_ns=now_ns - job.since_ns,
        workers=tuple(replace(worker, since_ns=now_ns - worker.since_ns) for worker in job.workers),
        copies=tuple(replace(copy, since_ns=now_ns - copy.since_ns) for copy in job.copies),
    )
