"""Codec of what users and operators see: jobs, their events, the cluster, output of workers.

Rule: monotonic timestamps are sent as ages, which the receiver subtracts from its own clock. Jobs
are sent without their payload: it may be large, and only workers need it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.core.config import JobSpec
from elastic.core.events.shared import Note
from elastic.core.facts import Generation, NodeId, WorkerId
from elastic.core.records import Cordon
from elastic.core.view import ClusterView, JobView, NodeView
from elastic.errors import PeerError
from elastic.wire.codec import MessageCodec
from elastic.wire.envelope import Envelope
from elastic.wire.generated.elastic.v1 import facts_pb2, jobs_pb2


@dataclass(frozen=True)
class TimedNote:
    """A note with the coordinator's wall clock, in nanoseconds since 1970."""

    note: Note
    unix_ns: int


@dataclass(frozen=True)
class LogChunk:
    """Output of one worker.

    Attributes:
        rank: the worker's rank when it printed this, -1 before its first group.
        generation: the generation of its group at that time.
        unix_ns: the agent's wall clock at that time, 0 if not known.
    """

    worker_id: WorkerId
    rank: int
    generation: Generation
    node_id: NodeId
    text: str
    unix_ns: int = 0


@dataclass(frozen=True)
class ClusterStatus:
    """A coordinator and its view of the cluster.

    Attributes:
        version: the version of elastic-torch.
        protocol: "major.minor".
        store: the membership store, without credentials.
        uptime_ns: for how long the coordinator has been the leader.
        standby: "" from the leader; from a standby, the age of this view and the leader. A
            standby's view has only jobs and cordons, as read from the store.
        coordinators: "host:port" of all coordinators that share the store, () if only one.
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
    """`ClusterStatus` as it is sent: with the fields of the view beside the others."""

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
"""Replaces the values of a job's environment variables, which may be passwords."""

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
        ConfigError: a value cannot be encoded (a number out of range, a path that is not
            Unicode).
    """
    request = jobs_pb2.SubmitRequest()
    request.spec.SetInParent()
    _SPEC.fill(spec, request.spec)
    return request


def spec_of(request: jobs_pb2.SubmitRequest) -> JobSpec:
    """Return the specification in a request; PeerError if it is missing, or breaks a rule."""
    if not request.HasField("spec"):
        raise PeerError("SubmitRequest.spec is missing: expected the specification of a job")
    return _SPEC.read(request.spec)


def job_to_proto(job: JobView, now_ns: int) -> jobs_pb2.Job:
    """Return a job as it is sent at `now_ns`, on the clock of its timestamps."""
    proto = jobs_pb2.Job()
    _JOB.fill(_turned(without_secrets(job), now_ns), proto)
    return proto


def job_from_proto(proto: jobs_pb2.Job, now_ns: int) -> JobView:
    """Return a job with timestamps on the clock of `now_ns`; PeerError if a value is not valid."""
    return _turned(_JOB.read(proto), now_ns)


def job_event_to_proto(event: JobEvent, now_ns: int) -> jobs_pb2.JobEvent:
    if isinstance(event, JobView):
        return _EVENT.to_proto(_turned(without_secrets(event), now_ns))
    return _EVENT.to_proto(event)


def job_event_from_proto(proto: jobs_pb2.JobEvent, now_ns: int) -> JobEvent:
    """Return a snapshot or note of a job; PeerError if it has invalid values, or is neither."""
    event = _EVENT.from_proto(proto)
    return _turned(event, now_ns) if isinstance(event, JobView) else event


def timed_note_to_proto(note: TimedNote) -> jobs_pb2.TimedNote:
    proto = jobs_pb2.TimedNote()
    _TIMED_NOTE.fill(note, proto)
    return proto


def timed_note_from_proto(proto: jobs_pb2.TimedNote) -> TimedNote:
    """Return a note of a job; PeerError if the message has invalid values."""
    return _TIMED_NOTE.read(proto)


def log_chunk_to_proto(chunk: LogChunk) -> jobs_pb2.LogChunk:
    proto = jobs_pb2.LogChunk()
    _LOG_CHUNK.fill(chunk, proto)
    return proto


def log_chunk_from_proto(proto: jobs_pb2.LogChunk) -> LogChunk:
    return _LOG_CHUNK.read(proto)


def status_to_proto(status: ClusterStatus) -> jobs_pb2.ClusterStatus:
    """Return the cluster as it is sent; ages are relative to the view's own timestamp."""
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
    """Return the cluster; its timestamps are on the caller's clock, which is at `now_ns`.

    Raises:
        PeerError: the message has invalid values.
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
    """Return a job for display: without its code, the values of its environment, and its key.

    Former workers are left out too: there may be thousands, and the record has them.
    """
    record = job.record
    if record.former:
        record = replace(record, former=())
    entry, group = record.spec.entry, record.group
    if entry.payload or entry.env or entry.imports:
        shown = tuple((name, HIDDEN) for name, _ in entry.env)
        bare = replace(entry, payload=b"", env=shown, imports=())
        record = replace(record, spec=replace(record.spec, entry=bare))
    if group is not None and group.key:
        record = replace(record, group=replace(group, key=""))
    return job if record is job.record else replace(job, record=record)


def _turned(job: JobView, now_ns: int) -> JobView:
    """Convert timestamps to ages; each is `now` minus the other, so also ages to timestamps."""
    return replace(
        job,
        since_ns=now_ns - job.since_ns,
        workers=tuple(replace(worker, since_ns=now_ns - worker.since_ns) for worker in job.workers),
        copies=tuple(replace(copy, since_ns=now_ns - copy.since_ns) for copy in job.copies),
    )
