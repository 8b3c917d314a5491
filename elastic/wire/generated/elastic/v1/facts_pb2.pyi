from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodePhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_PHASE_UNSPECIFIED: _ClassVar[NodePhase]
    NODE_PHASE_READY: _ClassVar[NodePhase]
    NODE_PHASE_DISCONNECTED: _ClassVar[NodePhase]
    NODE_PHASE_DRAINING: _ClassVar[NodePhase]
    NODE_PHASE_LOST: _ClassVar[NodePhase]
    NODE_PHASE_LEFT: _ClassVar[NodePhase]

class WorkerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_PHASE_UNSPECIFIED: _ClassVar[WorkerPhase]
    WORKER_PHASE_STARTING: _ClassVar[WorkerPhase]
    WORKER_PHASE_READY: _ClassVar[WorkerPhase]
    WORKER_PHASE_FORMING: _ClassVar[WorkerPhase]
    WORKER_PHASE_TRAINING: _ClassVar[WorkerPhase]
    WORKER_PHASE_BROKEN: _ClassVar[WorkerPhase]
    WORKER_PHASE_FINISHED: _ClassVar[WorkerPhase]
    WORKER_PHASE_EXITED: _ClassVar[WorkerPhase]

class ExitKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXIT_KIND_UNSPECIFIED: _ClassVar[ExitKind]
    EXIT_KIND_CODE: _ClassVar[ExitKind]
    EXIT_KIND_SIGNAL: _ClassVar[ExitKind]
    EXIT_KIND_STOPPED: _ClassVar[ExitKind]
    EXIT_KIND_HUNG: _ClassVar[ExitKind]
    EXIT_KIND_LOST: _ClassVar[ExitKind]
    EXIT_KIND_SPAWN_FAILED: _ClassVar[ExitKind]

class Strategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STRATEGY_UNSPECIFIED: _ClassVar[Strategy]
    STRATEGY_PACK: _ClassVar[Strategy]
    STRATEGY_SPREAD: _ClassVar[Strategy]
    STRATEGY_STRICT_PACK: _ClassVar[Strategy]
    STRATEGY_STRICT_SPREAD: _ClassVar[Strategy]

class EntryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENTRY_KIND_UNSPECIFIED: _ClassVar[EntryKind]
    ENTRY_KIND_FUNCTION: _ClassVar[EntryKind]
    ENTRY_KIND_SCRIPT: _ClassVar[EntryKind]
    ENTRY_KIND_MODULE: _ClassVar[EntryKind]

class ReportKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPORT_KIND_UNSPECIFIED: _ClassVar[ReportKind]
    REPORT_KIND_SCRIPT: _ClassVar[ReportKind]
    REPORT_KIND_AUTOMATIC: _ClassVar[ReportKind]
    REPORT_KIND_VALIDATION: _ClassVar[ReportKind]

class CheckpointStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKPOINT_STATUS_UNSPECIFIED: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_COMMITTED: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_PENDING_VALIDATION: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_VALIDATED: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_VALIDATION_TIMEOUT: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_VALIDATION_FAILED: _ClassVar[CheckpointStatus]

class JobPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_PHASE_UNSPECIFIED: _ClassVar[JobPhase]
    JOB_PHASE_PENDING: _ClassVar[JobPhase]
    JOB_PHASE_RUNNING: _ClassVar[JobPhase]
    JOB_PHASE_STOPPING: _ClassVar[JobPhase]
    JOB_PHASE_SUCCEEDED: _ClassVar[JobPhase]
    JOB_PHASE_FAILED: _ClassVar[JobPhase]
    JOB_PHASE_STOPPED: _ClassVar[JobPhase]
    JOB_PHASE_PAUSED: _ClassVar[JobPhase]
NODE_PHASE_UNSPECIFIED: NodePhase
NODE_PHASE_READY: NodePhase
NODE_PHASE_DISCONNECTED: NodePhase
NODE_PHASE_DRAINING: NodePhase
NODE_PHASE_LOST: NodePhase
NODE_PHASE_LEFT: NodePhase
WORKER_PHASE_UNSPECIFIED: WorkerPhase
WORKER_PHASE_STARTING: WorkerPhase
WORKER_PHASE_READY: WorkerPhase
WORKER_PHASE_FORMING: WorkerPhase
WORKER_PHASE_TRAINING: WorkerPhase
WORKER_PHASE_BROKEN: WorkerPhase
WORKER_PHASE_FINISHED: WorkerPhase
WORKER_PHASE_EXITED: WorkerPhase
EXIT_KIND_UNSPECIFIED: ExitKind
EXIT_KIND_CODE: ExitKind
EXIT_KIND_SIGNAL: ExitKind
EXIT_KIND_STOPPED: ExitKind
EXIT_KIND_HUNG: ExitKind
EXIT_KIND_LOST: ExitKind
EXIT_KIND_SPAWN_FAILED: ExitKind
STRATEGY_UNSPECIFIED: Strategy
STRATEGY_PACK: Strategy
STRATEGY_SPREAD: Strategy
STRATEGY_STRICT_PACK: Strategy
STRATEGY_STRICT_SPREAD: Strategy
ENTRY_KIND_UNSPECIFIED: EntryKind
ENTRY_KIND_FUNCTION: EntryKind
ENTRY_KIND_SCRIPT: EntryKind
ENTRY_KIND_MODULE: EntryKind
REPORT_KIND_UNSPECIFIED: ReportKind
REPORT_KIND_SCRIPT: ReportKind
REPORT_KIND_AUTOMATIC: ReportKind
REPORT_KIND_VALIDATION: ReportKind
CHECKPOINT_STATUS_UNSPECIFIED: CheckpointStatus
CHECKPOINT_STATUS_COMMITTED: CheckpointStatus
CHECKPOINT_STATUS_PENDING_VALIDATION: CheckpointStatus
CHECKPOINT_STATUS_VALIDATED: CheckpointStatus
CHECKPOINT_STATUS_VALIDATION_TIMEOUT: CheckpointStatus
CHECKPOINT_STATUS_VALIDATION_FAILED: CheckpointStatus
JOB_PHASE_UNSPECIFIED: JobPhase
JOB_PHASE_PENDING: JobPhase
JOB_PHASE_RUNNING: JobPhase
JOB_PHASE_STOPPING: JobPhase
JOB_PHASE_SUCCEEDED: JobPhase
JOB_PHASE_FAILED: JobPhase
JOB_PHASE_STOPPED: JobPhase
JOB_PHASE_PAUSED: JobPhase

class Pair(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Amount(_message.Message):
    __slots__ = ("name", "milli")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MILLI_FIELD_NUMBER: _ClassVar[int]
    name: str
    milli: int
    def __init__(self, name: _Optional[str] = ..., milli: _Optional[int] = ...) -> None: ...

class Resources(_message.Message):
    __slots__ = ("milli",)
    MILLI_FIELD_NUMBER: _ClassVar[int]
    milli: _containers.RepeatedCompositeFieldContainer[Amount]
    def __init__(self, milli: _Optional[_Iterable[_Union[Amount, _Mapping]]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "incarnation", "host", "num_slots", "resources", "labels", "accelerator_type", "version")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_TYPE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    host: str
    num_slots: int
    resources: Resources
    labels: _containers.RepeatedCompositeFieldContainer[Pair]
    accelerator_type: str
    version: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., num_slots: _Optional[int] = ..., resources: _Optional[_Union[Resources, _Mapping]] = ..., labels: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., accelerator_type: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class ExitCause(_message.Message):
    __slots__ = ("kind", "code", "detail")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    kind: ExitKind
    code: int
    detail: str
    def __init__(self, kind: _Optional[_Union[ExitKind, str]] = ..., code: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("error_type", "message", "traceback", "position", "damaged")
    ERROR_TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    error_type: str
    message: str
    traceback: str
    position: str
    damaged: str
    def __init__(self, error_type: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., position: _Optional[str] = ..., damaged: _Optional[str] = ...) -> None: ...

class Goodput(_message.Message):
    __slots__ = ("productive_ns", "data_wait_ns", "straggler_wait_ns", "redone_ns", "reform_ns", "start_ns", "restore_ns", "checkpoint_stall_ns", "eval_ns", "user_ns", "drain_ns", "below_min_ns")
    PRODUCTIVE_NS_FIELD_NUMBER: _ClassVar[int]
    DATA_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    REDONE_NS_FIELD_NUMBER: _ClassVar[int]
    REFORM_NS_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_NS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STALL_NS_FIELD_NUMBER: _ClassVar[int]
    EVAL_NS_FIELD_NUMBER: _ClassVar[int]
    USER_NS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_NS_FIELD_NUMBER: _ClassVar[int]
    BELOW_MIN_NS_FIELD_NUMBER: _ClassVar[int]
    productive_ns: int
    data_wait_ns: int
    straggler_wait_ns: int
    redone_ns: int
    reform_ns: int
    start_ns: int
    restore_ns: int
    checkpoint_stall_ns: int
    eval_ns: int
    user_ns: int
    drain_ns: int
    below_min_ns: int
    def __init__(self, productive_ns: _Optional[int] = ..., data_wait_ns: _Optional[int] = ..., straggler_wait_ns: _Optional[int] = ..., redone_ns: _Optional[int] = ..., reform_ns: _Optional[int] = ..., start_ns: _Optional[int] = ..., restore_ns: _Optional[int] = ..., checkpoint_stall_ns: _Optional[int] = ..., eval_ns: _Optional[int] = ..., user_ns: _Optional[int] = ..., drain_ns: _Optional[int] = ..., below_min_ns: _Optional[int] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("steps", "wall_ns", "data_wait_ns", "compute_ns", "exchange_ns", "straggler_wait_ns", "commit_ns", "bytes_sent", "samples", "tokens", "straggler", "epoch", "step", "num_epochs", "num_steps", "logged", "unsaved")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    DATA_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_NS_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRAGGLER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_FIELD_NUMBER: _ClassVar[int]
    steps: int
    wall_ns: int
    data_wait_ns: int
    compute_ns: int
    exchange_ns: int
    straggler_wait_ns: int
    commit_ns: int
    bytes_sent: int
    samples: int
    tokens: int
    straggler: int
    epoch: int
    step: int
    num_epochs: int
    num_steps: int
    logged: str
    unsaved: str
    def __init__(self, steps: _Optional[int] = ..., wall_ns: _Optional[int] = ..., data_wait_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., exchange_ns: _Optional[int] = ..., straggler_wait_ns: _Optional[int] = ..., commit_ns: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., samples: _Optional[int] = ..., tokens: _Optional[int] = ..., straggler: _Optional[int] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., num_epochs: _Optional[int] = ..., num_steps: _Optional[int] = ..., logged: _Optional[str] = ..., unsaved: _Optional[str] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("worker_id", "job_id", "phase", "generation", "store_address", "pid", "exit", "failure", "result", "in_place", "copies_every", "copies_sharded", "micro_batches", "left", "spent")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    COPIES_EVERY_FIELD_NUMBER: _ClassVar[int]
    COPIES_SHARDED_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    job_id: str
    phase: WorkerPhase
    generation: int
    store_address: str
    pid: int
    exit: ExitCause
    failure: Failure
    result: str
    in_place: bool
    copies_every: int
    copies_sharded: bool
    micro_batches: int
    left: str
    spent: bool
    def __init__(self, worker_id: _Optional[str] = ..., job_id: _Optional[str] = ..., phase: _Optional[_Union[WorkerPhase, str]] = ..., generation: _Optional[int] = ..., store_address: _Optional[str] = ..., pid: _Optional[int] = ..., exit: _Optional[_Union[ExitCause, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., result: _Optional[str] = ..., in_place: bool = ..., copies_every: _Optional[int] = ..., copies_sharded: bool = ..., micro_batches: _Optional[int] = ..., left: _Optional[str] = ..., spent: bool = ...) -> None: ...

class HeldCopy(_message.Message):
    __slots__ = ("job_id", "generation", "steps", "source")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    generation: int
    steps: int
    source: str
    def __init__(self, job_id: _Optional[str] = ..., generation: _Optional[int] = ..., steps: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("worker_id", "node_id", "rank", "store_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    node_id: str
    rank: int
    store_address: str
    def __init__(self, worker_id: _Optional[str] = ..., node_id: _Optional[str] = ..., rank: _Optional[int] = ..., store_address: _Optional[str] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("generation", "members", "reason", "key")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    generation: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    reason: str
    key: str
    def __init__(self, generation: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., reason: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class LeavingNode(_message.Message):
    __slots__ = ("node_id", "ranks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node_id: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("job_id", "worker_id", "generation", "rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "leader_address", "reported_checkpoint", "cause", "copies", "copies_key", "node_devices", "group_key", "automatic_checkpoint", "holders", "copied")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPORTED_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    COPIES_KEY_FIELD_NUMBER: _ClassVar[int]
    NODE_DEVICES_FIELD_NUMBER: _ClassVar[int]
    GROUP_KEY_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    worker_id: str
    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    leader_address: str
    reported_checkpoint: str
    cause: str
    copies: _containers.RepeatedScalarFieldContainer[str]
    copies_key: str
    node_devices: _containers.RepeatedScalarFieldContainer[str]
    group_key: str
    automatic_checkpoint: str
    holders: int
    copied: HeldCopy
    def __init__(self, job_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., local_rank: _Optional[int] = ..., local_world_size: _Optional[int] = ..., node_rank: _Optional[int] = ..., num_nodes: _Optional[int] = ..., leader_address: _Optional[str] = ..., reported_checkpoint: _Optional[str] = ..., cause: _Optional[str] = ..., copies: _Optional[_Iterable[str]] = ..., copies_key: _Optional[str] = ..., node_devices: _Optional[_Iterable[str]] = ..., group_key: _Optional[str] = ..., automatic_checkpoint: _Optional[str] = ..., holders: _Optional[int] = ..., copied: _Optional[_Union[HeldCopy, _Mapping]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("kind", "target", "args", "payload", "working_dir", "python_path", "env", "imports")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    WORKING_DIR_FIELD_NUMBER: _ClassVar[int]
    PYTHON_PATH_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    IMPORTS_FIELD_NUMBER: _ClassVar[int]
    kind: EntryKind
    target: str
    args: _containers.RepeatedScalarFieldContainer[str]
    payload: bytes
    working_dir: str
    python_path: _containers.RepeatedScalarFieldContainer[str]
    env: _containers.RepeatedCompositeFieldContainer[Pair]
    imports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[_Union[EntryKind, str]] = ..., target: _Optional[str] = ..., args: _Optional[_Iterable[str]] = ..., payload: _Optional[bytes] = ..., working_dir: _Optional[str] = ..., python_path: _Optional[_Iterable[str]] = ..., env: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., imports: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckpointRecord(_message.Message):
    __slots__ = ("path", "generation", "index", "metrics", "status", "request", "kind")
    PATH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    path: str
    generation: int
    index: int
    metrics: str
    status: CheckpointStatus
    request: int
    kind: ReportKind
    def __init__(self, path: _Optional[str] = ..., generation: _Optional[int] = ..., index: _Optional[int] = ..., metrics: _Optional[str] = ..., status: _Optional[_Union[CheckpointStatus, str]] = ..., request: _Optional[int] = ..., kind: _Optional[_Union[ReportKind, str]] = ...) -> None: ...

class JobSpec(_message.Message):
    __slots__ = ("job_id", "name", "entry", "min_workers", "max_workers", "workers_per_replica", "resources_per_worker", "strategy", "accelerator_type", "label_selector", "backend", "collective_timeout_s", "max_failures", "run_path", "num_to_keep", "score_attribute", "score_order", "hang_timeout_s", "resume_from", "max_preemptions", "priority", "non_preemptible", "own_steps", "resumes", "grace_s", "feeds")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_PER_REPLICA_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_TYPE_FIELD_NUMBER: _ClassVar[int]
    LABEL_SELECTOR_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_FAILURES_FIELD_NUMBER: _ClassVar[int]
    RUN_PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_TO_KEEP_FIELD_NUMBER: _ClassVar[int]
    SCORE_ATTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    SCORE_ORDER_FIELD_NUMBER: _ClassVar[int]
    HANG_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    MAX_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NON_PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    OWN_STEPS_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    FEEDS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    name: str
    entry: Entry
    min_workers: int
    max_workers: int
    workers_per_replica: int
    resources_per_worker: Resources
    strategy: Strategy
    accelerator_type: str
    label_selector: _containers.RepeatedCompositeFieldContainer[Pair]
    backend: str
    collective_timeout_s: float
    max_failures: int
    run_path: str
    num_to_keep: int
    score_attribute: str
    score_order: str
    hang_timeout_s: float
    resume_from: str
    max_preemptions: int
    priority: int
    non_preemptible: bool
    own_steps: bool
    resumes: bool
    grace_s: float
    feeds: str
    def __init__(self, job_id: _Optional[str] = ..., name: _Optional[str] = ..., entry: _Optional[_Union[Entry, _Mapping]] = ..., min_workers: _Optional[int] = ..., max_workers: _Optional[int] = ..., workers_per_replica: _Optional[int] = ..., resources_per_worker: _Optional[_Union[Resources, _Mapping]] = ..., strategy: _Optional[_Union[Strategy, str]] = ..., accelerator_type: _Optional[str] = ..., label_selector: _Optional[_Iterable[_Union[Pair, _Mapping]]] = ..., backend: _Optional[str] = ..., collective_timeout_s: _Optional[float] = ..., max_failures: _Optional[int] = ..., run_path: _Optional[str] = ..., num_to_keep: _Optional[int] = ..., score_attribute: _Optional[str] = ..., score_order: _Optional[str] = ..., hang_timeout_s: _Optional[float] = ..., resume_from: _Optional[str] = ..., max_preemptions: _Optional[int] = ..., priority: _Optional[int] = ..., non_preemptible: bool = ..., own_steps: bool = ..., resumes: bool = ..., grace_s: _Optional[float] = ..., feeds: _Optional[str] = ...) -> None: ...
