from elastic.wire.generated.elastic.v1 import facts_pb2 as _facts_pb2
from elastic.wire.generated.elastic.v1 import records_pb2 as _records_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: _facts_pb2.JobSpec
    def __init__(self, spec: _Optional[_Union[_facts_pb2.JobSpec, _Mapping]] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class StopJobRequest(_message.Message):
    __slots__ = ("job", "reason", "now")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    job: str
    reason: str
    now: bool
    def __init__(self, job: _Optional[str] = ..., reason: _Optional[str] = ..., now: bool = ...) -> None: ...

class StopJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("job", "min_workers", "max_workers")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    job: str
    min_workers: int
    max_workers: int
    def __init__(self, job: _Optional[str] = ..., min_workers: _Optional[int] = ..., max_workers: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("include_ended",)
    INCLUDE_ENDED_FIELD_NUMBER: _ClassVar[int]
    include_ended: bool
    def __init__(self, include_ended: bool = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("job", "timed_note")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMED_NOTE_FIELD_NUMBER: _ClassVar[int]
    job: Job
    timed_note: TimedNote
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., timed_note: _Optional[_Union[TimedNote, _Mapping]] = ...) -> None: ...

class Note(_message.Message):
    __slots__ = ("name", "job_id", "fields")
    NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    job_id: str
    fields: _containers.RepeatedCompositeFieldContainer[_facts_pb2.Pair]
    def __init__(self, name: _Optional[str] = ..., job_id: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[_facts_pb2.Pair, _Mapping]]] = ...) -> None: ...

class TimedNote(_message.Message):
    __slots__ = ("note", "unix_ns")
    NOTE_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    note: Note
    unix_ns: int
    def __init__(self, note: _Optional[_Union[Note, _Mapping]] = ..., unix_ns: _Optional[int] = ...) -> None: ...

class StacksRequest(_message.Message):
    __slots__ = ("job", "ranks")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    job: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class StacksResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[str]] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("job", "rank", "seconds")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    seconds: float
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("job", "follow", "after_unix_ns")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    AFTER_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    job: str
    follow: bool
    after_unix_ns: int
    def __init__(self, job: _Optional[str] = ..., follow: bool = ..., after_unix_ns: _Optional[int] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("job", "ranks", "tail_lines", "follow")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    job: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    tail_lines: int
    follow: bool
    def __init__(self, job: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., tail_lines: _Optional[int] = ..., follow: bool = ...) -> None: ...

class LogChunk(_message.Message):
    __slots__ = ("worker_id", "rank", "generation", "node_id", "text", "unix_ns")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rank: int
    generation: int
    node_id: str
    text: str
    unix_ns: int
    def __init__(self, worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., generation: _Optional[int] = ..., node_id: _Optional[str] = ..., text: _Optional[str] = ..., unix_ns: _Optional[int] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("record", "reason", "age_ns", "workers", "copies", "unreported_ns")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    UNREPORTED_NS_FIELD_NUMBER: _ClassVar[int]
    record: _records_pb2.JobRecord
    reason: str
    age_ns: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    copies: _containers.RepeatedCompositeFieldContainer[CopyView]
    unreported_ns: int
    def __init__(self, record: _Optional[_Union[_records_pb2.JobRecord, _Mapping]] = ..., reason: _Optional[str] = ..., age_ns: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ..., copies: _Optional[_Iterable[_Union[CopyView, _Mapping]]] = ..., unreported_ns: _Optional[int] = ...) -> None: ...

class CopyView(_message.Message):
    __slots__ = ("node_id", "source", "generation", "steps", "age_ns")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    source: str
    generation: int
    steps: int
    age_ns: int
    def __init__(self, node_id: _Optional[str] = ..., source: _Optional[str] = ..., generation: _Optional[int] = ..., steps: _Optional[int] = ..., age_ns: _Optional[int] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("report", "node_id", "rank", "age_ns", "steps", "telemetry")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    report: _facts_pb2.WorkerReport
    node_id: str
    rank: int
    age_ns: int
    steps: int
    telemetry: _facts_pb2.Telemetry
    def __init__(self, report: _Optional[_Union[_facts_pb2.WorkerReport, _Mapping]] = ..., node_id: _Optional[str] = ..., rank: _Optional[int] = ..., age_ns: _Optional[int] = ..., steps: _Optional[int] = ..., telemetry: _Optional[_Union[_facts_pb2.Telemetry, _Mapping]] = ...) -> None: ...

class NodeView(_message.Message):
    __slots__ = ("node", "phase", "age_ns", "free_slots", "reason", "cordoned")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    AGE_NS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    node: _facts_pb2.Node
    phase: _facts_pb2.NodePhase
    age_ns: int
    free_slots: int
    reason: str
    cordoned: bool
    def __init__(self, node: _Optional[_Union[_facts_pb2.Node, _Mapping]] = ..., phase: _Optional[_Union[_facts_pb2.NodePhase, str]] = ..., age_ns: _Optional[int] = ..., free_slots: _Optional[int] = ..., reason: _Optional[str] = ..., cordoned: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("coordinator", "version", "protocol", "store", "uptime_ns", "nodes", "jobs", "standby", "cordons", "coordinators")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    CORDONS_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    coordinator: str
    version: str
    protocol: str
    store: str
    uptime_ns: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeView]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    standby: str
    cordons: _containers.RepeatedCompositeFieldContainer[_records_pb2.Cordon]
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, coordinator: _Optional[str] = ..., version: _Optional[str] = ..., protocol: _Optional[str] = ..., store: _Optional[str] = ..., uptime_ns: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeView, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., standby: _Optional[str] = ..., cordons: _Optional[_Iterable[_Union[_records_pb2.Cordon, _Mapping]]] = ..., coordinators: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "timeout_s", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    timeout_s: float
    reason: str
    def __init__(self, node: _Optional[str] = ..., timeout_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class CordonRequest(_message.Message):
    __slots__ = ("node", "cordoned", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    cordoned: bool
    reason: str
    def __init__(self, node: _Optional[str] = ..., cordoned: bool = ..., reason: _Optional[str] = ...) -> None: ...

class CordonResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
