from elastic.wire.generated.elastic.v1 import facts_pb2 as _facts_pb2
from elastic.wire.generated.elastic.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentToCoordinator(_message.Message):
    __slots__ = ("hello", "worker_update", "reported", "drain_notice", "node_health", "progress", "log_lines", "pulse", "probe_ack", "links_tried", "copies_held", "copy_failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WORKER_UPDATE_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_NOTICE_FIELD_NUMBER: _ClassVar[int]
    NODE_HEALTH_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOG_LINES_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    PROBE_ACK_FIELD_NUMBER: _ClassVar[int]
    LINKS_TRIED_FIELD_NUMBER: _ClassVar[int]
    COPIES_HELD_FIELD_NUMBER: _ClassVar[int]
    COPY_FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    worker_update: _worker_pb2.WorkerUpdate
    reported: _worker_pb2.Reported
    drain_notice: DrainNotice
    node_health: NodeHealth
    progress: _worker_pb2.Progress
    log_lines: LogLines
    pulse: _worker_pb2.Pulse
    probe_ack: ProbeAck
    links_tried: LinksTried
    copies_held: CopiesHeld
    copy_failed: CopyFailed
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., worker_update: _Optional[_Union[_worker_pb2.WorkerUpdate, _Mapping]] = ..., reported: _Optional[_Union[_worker_pb2.Reported, _Mapping]] = ..., drain_notice: _Optional[_Union[DrainNotice, _Mapping]] = ..., node_health: _Optional[_Union[NodeHealth, _Mapping]] = ..., progress: _Optional[_Union[_worker_pb2.Progress, _Mapping]] = ..., log_lines: _Optional[_Union[LogLines, _Mapping]] = ..., pulse: _Optional[_Union[_worker_pb2.Pulse, _Mapping]] = ..., probe_ack: _Optional[_Union[ProbeAck, _Mapping]] = ..., links_tried: _Optional[_Union[LinksTried, _Mapping]] = ..., copies_held: _Optional[_Union[CopiesHeld, _Mapping]] = ..., copy_failed: _Optional[_Union[CopyFailed, _Mapping]] = ...) -> None: ...

class CoordinatorToAgent(_message.Message):
    __slots__ = ("welcome", "refusal", "start_worker", "stop_worker", "forget_worker", "announce", "leave_group", "report_ack", "release", "follow_logs", "probe", "try_links", "dump_stacks", "save_state", "preemption", "keep_copy", "drop_copy", "replicate", "coordinators", "drain", "run_events", "profile")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    START_WORKER_FIELD_NUMBER: _ClassVar[int]
    STOP_WORKER_FIELD_NUMBER: _ClassVar[int]
    FORGET_WORKER_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_GROUP_FIELD_NUMBER: _ClassVar[int]
    REPORT_ACK_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_LOGS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    TRY_LINKS_FIELD_NUMBER: _ClassVar[int]
    DUMP_STACKS_FIELD_NUMBER: _ClassVar[int]
    SAVE_STATE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    KEEP_COPY_FIELD_NUMBER: _ClassVar[int]
    DROP_COPY_FIELD_NUMBER: _ClassVar[int]
    REPLICATE_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RUN_EVENTS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    start_worker: StartWorker
    stop_worker: StopWorker
    forget_worker: ForgetWorker
    announce: _worker_pb2.Announce
    leave_group: _worker_pb2.LeaveGroup
    report_ack: _worker_pb2.ReportAck
    release: Release
    follow_logs: FollowLogs
    probe: Probe
    try_links: TryLinks
    dump_stacks: DumpStacks
    save_state: _worker_pb2.SaveState
    preemption: _worker_pb2.Preemption
    keep_copy: KeepCopy
    drop_copy: DropCopy
    replicate: Replicate
    coordinators: Coordinators
    drain: Drain
    run_events: _worker_pb2.RunEvents
    profile: _worker_pb2.Profile
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., start_worker: _Optional[_Union[StartWorker, _Mapping]] = ..., stop_worker: _Optional[_Union[StopWorker, _Mapping]] = ..., forget_worker: _Optional[_Union[ForgetWorker, _Mapping]] = ..., announce: _Optional[_Union[_worker_pb2.Announce, _Mapping]] = ..., leave_group: _Optional[_Union[_worker_pb2.LeaveGroup, _Mapping]] = ..., report_ack: _Optional[_Union[_worker_pb2.ReportAck, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., follow_logs: _Optional[_Union[FollowLogs, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., try_links: _Optional[_Union[TryLinks, _Mapping]] = ..., dump_stacks: _Optional[_Union[DumpStacks, _Mapping]] = ..., save_state: _Optional[_Union[_worker_pb2.SaveState, _Mapping]] = ..., preemption: _Optional[_Union[_worker_pb2.Preemption, _Mapping]] = ..., keep_copy: _Optional[_Union[KeepCopy, _Mapping]] = ..., drop_copy: _Optional[_Union[DropCopy, _Mapping]] = ..., replicate: _Optional[_Union[Replicate, _Mapping]] = ..., coordinators: _Optional[_Union[Coordinators, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., run_events: _Optional[_Union[_worker_pb2.RunEvents, _Mapping]] = ..., profile: _Optional[_Union[_worker_pb2.Profile, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node", "workers", "draining", "drain_reason", "drain_timeout_ns", "reports_due", "copies", "copies_at", "problems")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAIN_REASON_FIELD_NUMBER: _ClassVar[int]
    DRAIN_TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_DUE_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    COPIES_AT_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    node: _facts_pb2.Node
    workers: _containers.RepeatedCompositeFieldContainer[_facts_pb2.WorkerReport]
    draining: bool
    drain_reason: str
    drain_timeout_ns: int
    reports_due: int
    copies: _containers.RepeatedCompositeFieldContainer[_facts_pb2.HeldCopy]
    copies_at: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[_Union[_facts_pb2.Node, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[_facts_pb2.WorkerReport, _Mapping]]] = ..., draining: bool = ..., drain_reason: _Optional[str] = ..., drain_timeout_ns: _Optional[int] = ..., reports_due: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[_facts_pb2.HeldCopy, _Mapping]]] = ..., copies_at: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainNotice(_message.Message):
    __slots__ = ("reason", "timeout_ns")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    timeout_ns: int
    def __init__(self, reason: _Optional[str] = ..., timeout_ns: _Optional[int] = ...) -> None: ...

class NodeHealth(_message.Message):
    __slots__ = ("problems",)
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, problems: _Optional[_Iterable[str]] = ...) -> None: ...

class ProbeAck(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class LinksTried(_message.Message):
    __slots__ = ("job_id", "reached", "unreachable")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reached: _containers.RepeatedScalarFieldContainer[str]
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_id: _Optional[str] = ..., reached: _Optional[_Iterable[str]] = ..., unreachable: _Optional[_Iterable[str]] = ...) -> None: ...

class LogLines(_message.Message):
    __slots__ = ("follow_id", "worker_id", "text", "end", "unix_ns", "generation", "rank")
    FOLLOW_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    follow_id: str
    worker_id: str
    text: str
    end: bool
    unix_ns: int
    generation: int
    rank: int
    def __init__(self, follow_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., text: _Optional[str] = ..., end: bool = ..., unix_ns: _Optional[int] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("coordinator", "term", "history")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    coordinator: str
    term: int
    history: str
    def __init__(self, coordinator: _Optional[str] = ..., term: _Optional[int] = ..., history: _Optional[str] = ...) -> None: ...

class Coordinators(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "final")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    final: bool
    def __init__(self, reason: _Optional[str] = ..., final: bool = ...) -> None: ...

class StartWorker(_message.Message):
    __slots__ = ("worker_id", "spec", "ahead")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    spec: _facts_pb2.JobSpec
    ahead: bool
    def __init__(self, worker_id: _Optional[str] = ..., spec: _Optional[_Union[_facts_pb2.JobSpec, _Mapping]] = ..., ahead: bool = ...) -> None: ...

class StopWorker(_message.Message):
    __slots__ = ("worker_id", "grace_ns", "reason", "asks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_NS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace_ns: int
    reason: str
    asks: bool
    def __init__(self, worker_id: _Optional[str] = ..., grace_ns: _Optional[int] = ..., reason: _Optional[str] = ..., asks: bool = ...) -> None: ...

class ForgetWorker(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason", "timeout_ns")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    timeout_ns: int
    def __init__(self, reason: _Optional[str] = ..., timeout_ns: _Optional[int] = ...) -> None: ...

class FollowLogs(_message.Message):
    __slots__ = ("follow_id", "worker_id", "tail_lines", "follow", "stop", "room")
    FOLLOW_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TAIL_LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    follow_id: str
    worker_id: str
    tail_lines: int
    follow: bool
    stop: bool
    room: int
    def __init__(self, follow_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., tail_lines: _Optional[int] = ..., follow: bool = ..., stop: bool = ..., room: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class TryLinks(_message.Message):
    __slots__ = ("job_id", "links")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    links: _containers.RepeatedCompositeFieldContainer[Link]
    def __init__(self, job_id: _Optional[str] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("node_id", "address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class DumpStacks(_message.Message):
    __slots__ = ("worker_id", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CopiesHeld(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: _containers.RepeatedCompositeFieldContainer[_facts_pb2.HeldCopy]
    def __init__(self, copies: _Optional[_Iterable[_Union[_facts_pb2.HeldCopy, _Mapping]]] = ...) -> None: ...

class CopyFailed(_message.Message):
    __slots__ = ("job_id", "node_id", "reason")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    node_id: str
    reason: str
    def __init__(self, job_id: _Optional[str] = ..., node_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class KeepCopy(_message.Message):
    __slots__ = ("job_id", "key")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    key: str
    def __init__(self, job_id: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class DropCopy(_message.Message):
    __slots__ = ("job_id", "reason", "source", "generation", "steps")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    reason: str
    source: str
    generation: int
    steps: int
    def __init__(self, job_id: _Optional[str] = ..., reason: _Optional[str] = ..., source: _Optional[str] = ..., generation: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class Replicate(_message.Message):
    __slots__ = ("job_id", "node_id", "address", "key", "every_n_steps", "source", "generation")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    EVERY_N_STEPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    node_id: str
    address: str
    key: str
    every_n_steps: int
    source: str
    generation: int
    def __init__(self, job_id: _Optional[str] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., key: _Optional[str] = ..., every_n_steps: _Optional[int] = ..., source: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...
