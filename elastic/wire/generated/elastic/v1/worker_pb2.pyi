from elastic.wire.generated.elastic.v1 import facts_pb2 as _facts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_CODE_UNSPECIFIED: _ClassVar[RefusalCode]
    REFUSAL_CODE_NONE: _ClassVar[RefusalCode]
    REFUSAL_CODE_JOB_UNKNOWN: _ClassVar[RefusalCode]
    REFUSAL_CODE_JOB_ENDED: _ClassVar[RefusalCode]
    REFUSAL_CODE_GENERATION_OVER: _ClassVar[RefusalCode]
    REFUSAL_CODE_NO_MEMBER: _ClassVar[RefusalCode]
REFUSAL_CODE_UNSPECIFIED: RefusalCode
REFUSAL_CODE_NONE: RefusalCode
REFUSAL_CODE_JOB_UNKNOWN: RefusalCode
REFUSAL_CODE_JOB_ENDED: RefusalCode
REFUSAL_CODE_GENERATION_OVER: RefusalCode
REFUSAL_CODE_NO_MEMBER: RefusalCode

class PipeToWorker(_message.Message):
    __slots__ = ("assign", "announce", "leave_group", "report_ack", "stop", "ping", "save_state", "preemption", "run_events", "profile")
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_GROUP_FIELD_NUMBER: _ClassVar[int]
    REPORT_ACK_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    SAVE_STATE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    RUN_EVENTS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    assign: Assign
    announce: Announce
    leave_group: LeaveGroup
    report_ack: ReportAck
    stop: Stop
    ping: Ping
    save_state: SaveState
    preemption: Preemption
    run_events: RunEvents
    profile: Profile
    def __init__(self, assign: _Optional[_Union[Assign, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., leave_group: _Optional[_Union[LeaveGroup, _Mapping]] = ..., report_ack: _Optional[_Union[ReportAck, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., save_state: _Optional[_Union[SaveState, _Mapping]] = ..., preemption: _Optional[_Union[Preemption, _Mapping]] = ..., run_events: _Optional[_Union[RunEvents, _Mapping]] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ...) -> None: ...

class PipeToAgent(_message.Message):
    __slots__ = ("warm", "worker_update", "reported", "progress", "pong", "pulse")
    WARM_FIELD_NUMBER: _ClassVar[int]
    WORKER_UPDATE_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    warm: Warm
    worker_update: WorkerUpdate
    reported: Reported
    progress: Progress
    pong: Pong
    pulse: Pulse
    def __init__(self, warm: _Optional[_Union[Warm, _Mapping]] = ..., worker_update: _Optional[_Union[WorkerUpdate, _Mapping]] = ..., reported: _Optional[_Union[Reported, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("worker_id", "spec", "host", "devices", "log_dir", "ahead", "snapshots", "node_devices")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    LOG_DIR_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NODE_DEVICES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    spec: _facts_pb2.JobSpec
    host: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    log_dir: str
    ahead: bool
    snapshots: _containers.RepeatedScalarFieldContainer[str]
    node_devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., spec: _Optional[_Union[_facts_pb2.JobSpec, _Mapping]] = ..., host: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., log_dir: _Optional[str] = ..., ahead: bool = ..., snapshots: _Optional[_Iterable[str]] = ..., node_devices: _Optional[_Iterable[str]] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("assignment",)
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    assignment: _facts_pb2.Assignment
    def __init__(self, assignment: _Optional[_Union[_facts_pb2.Assignment, _Mapping]] = ...) -> None: ...

class LeaveGroup(_message.Message):
    __slots__ = ("worker_id", "generation", "at_boundary", "reason", "saves", "follows")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AT_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    at_boundary: bool
    reason: str
    saves: bool
    follows: bool
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., at_boundary: bool = ..., reason: _Optional[str] = ..., saves: bool = ..., follows: bool = ...) -> None: ...

class SaveState(_message.Message):
    __slots__ = ("worker_id", "generation", "request")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    request: int
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., request: _Optional[int] = ...) -> None: ...

class Preemption(_message.Message):
    __slots__ = ("worker_id", "generation", "timeout_ns", "reason", "nodes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    timeout_ns: int
    reason: str
    nodes: _containers.RepeatedCompositeFieldContainer[_facts_pb2.LeavingNode]
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., timeout_ns: _Optional[int] = ..., reason: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[_facts_pb2.LeavingNode, _Mapping]]] = ...) -> None: ...

class RunEvents(_message.Message):
    __slots__ = ("worker_id", "lines")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., lines: _Optional[_Iterable[str]] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("worker_id", "seconds", "name")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    seconds: float
    name: str
    def __init__(self, worker_id: _Optional[str] = ..., seconds: _Optional[float] = ..., name: _Optional[str] = ...) -> None: ...

class ReportAck(_message.Message):
    __slots__ = ("worker_id", "generation", "index", "accepted", "reason", "code", "kind")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    index: int
    accepted: bool
    reason: str
    code: RefusalCode
    kind: _facts_pb2.ReportKind
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., index: _Optional[int] = ..., accepted: bool = ..., reason: _Optional[str] = ..., code: _Optional[_Union[RefusalCode, str]] = ..., kind: _Optional[_Union[_facts_pb2.ReportKind, str]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason", "grace_ns", "asks")
    REASON_FIELD_NUMBER: _ClassVar[int]
    GRACE_NS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    grace_ns: int
    asks: bool
    def __init__(self, reason: _Optional[str] = ..., grace_ns: _Optional[int] = ..., asks: bool = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Warm(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("number", "times")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    number: int
    times: int
    def __init__(self, number: _Optional[int] = ..., times: _Optional[int] = ...) -> None: ...

class WorkerUpdate(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _facts_pb2.WorkerReport
    def __init__(self, report: _Optional[_Union[_facts_pb2.WorkerReport, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("worker_id", "job_id", "generation", "index", "rank", "metrics", "checkpoint", "status", "request", "kind")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    job_id: str
    generation: int
    index: int
    rank: int
    metrics: str
    checkpoint: str
    status: _facts_pb2.CheckpointStatus
    request: int
    kind: _facts_pb2.ReportKind
    def __init__(self, worker_id: _Optional[str] = ..., job_id: _Optional[str] = ..., generation: _Optional[int] = ..., index: _Optional[int] = ..., rank: _Optional[int] = ..., metrics: _Optional[str] = ..., checkpoint: _Optional[str] = ..., status: _Optional[_Union[_facts_pb2.CheckpointStatus, str]] = ..., request: _Optional[int] = ..., kind: _Optional[_Union[_facts_pb2.ReportKind, str]] = ...) -> None: ...

class Reported(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: Report
    def __init__(self, report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("worker_id", "generation", "steps", "first_step_unix_ns", "spent", "telemetry")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    steps: int
    first_step_unix_ns: int
    spent: _facts_pb2.Goodput
    telemetry: _facts_pb2.Telemetry
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., steps: _Optional[int] = ..., first_step_unix_ns: _Optional[int] = ..., spent: _Optional[_Union[_facts_pb2.Goodput, _Mapping]] = ..., telemetry: _Optional[_Union[_facts_pb2.Telemetry, _Mapping]] = ...) -> None: ...

class Pulse(_message.Message):
    __slots__ = ("worker_id", "generation", "waiting_ns", "still_ns", "epoch", "step", "begun", "longest_ns", "has_stepped", "working_ns", "work")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WAITING_NS_FIELD_NUMBER: _ClassVar[int]
    STILL_NS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    LONGEST_NS_FIELD_NUMBER: _ClassVar[int]
    HAS_STEPPED_FIELD_NUMBER: _ClassVar[int]
    WORKING_NS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    generation: int
    waiting_ns: int
    still_ns: int
    epoch: int
    step: int
    begun: _containers.RepeatedCompositeFieldContainer[CollectiveCount]
    longest_ns: int
    has_stepped: bool
    working_ns: int
    work: str
    def __init__(self, worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., waiting_ns: _Optional[int] = ..., still_ns: _Optional[int] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., begun: _Optional[_Iterable[_Union[CollectiveCount, _Mapping]]] = ..., longest_ns: _Optional[int] = ..., has_stepped: bool = ..., working_ns: _Optional[int] = ..., work: _Optional[str] = ...) -> None: ...

class CollectiveCount(_message.Message):
    __slots__ = ("name", "ranks", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    count: int
    def __init__(self, name: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., count: _Optional[int] = ...) -> None: ...
