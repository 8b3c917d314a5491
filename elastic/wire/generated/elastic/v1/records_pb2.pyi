from elastic.wire.generated.elastic.v1 import facts_pb2 as _facts_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoredRecord(_message.Message):
    __slots__ = ("format", "job_record", "nodes_record")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    JOB_RECORD_FIELD_NUMBER: _ClassVar[int]
    NODES_RECORD_FIELD_NUMBER: _ClassVar[int]
    format: int
    job_record: JobRecord
    nodes_record: NodesRecord
    def __init__(self, format: _Optional[int] = ..., job_record: _Optional[_Union[JobRecord, _Mapping]] = ..., nodes_record: _Optional[_Union[NodesRecord, _Mapping]] = ...) -> None: ...

class NodesRecord(_message.Message):
    __slots__ = ("cordons",)
    CORDONS_FIELD_NUMBER: _ClassVar[int]
    cordons: _containers.RepeatedCompositeFieldContainer[Cordon]
    def __init__(self, cordons: _Optional[_Iterable[_Union[Cordon, _Mapping]]] = ...) -> None: ...

class Cordon(_message.Message):
    __slots__ = ("node_id", "reason")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    reason: str
    def __init__(self, node_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RankFailure(_message.Message):
    __slots__ = ("rank", "failure")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    failure: _facts_pb2.Failure
    def __init__(self, rank: _Optional[int] = ..., failure: _Optional[_Union[_facts_pb2.Failure, _Mapping]] = ...) -> None: ...

class FormerWorker(_message.Message):
    __slots__ = ("worker_id", "rank", "generation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rank: int
    generation: int
    def __init__(self, worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class JobRecord(_message.Message):
    __slots__ = ("spec", "phase", "generation", "group", "failures", "losses", "checkpoints", "reason", "failure", "failed_worker", "result", "metrics", "sequence", "preemptions", "min_workers", "max_workers", "paused", "preempted_by", "submitter", "is_save_requested", "leaves_for", "since_unix_ns", "stopping", "rank_failures", "goodput", "former")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FAILED_WORKER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKERS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_BY_FIELD_NUMBER: _ClassVar[int]
    SUBMITTER_FIELD_NUMBER: _ClassVar[int]
    IS_SAVE_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FOR_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    RANK_FAILURES_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    spec: _facts_pb2.JobSpec
    phase: _facts_pb2.JobPhase
    generation: int
    group: _facts_pb2.Group
    failures: int
    losses: int
    checkpoints: _containers.RepeatedCompositeFieldContainer[_facts_pb2.CheckpointRecord]
    reason: str
    failure: _facts_pb2.Failure
    failed_worker: str
    result: str
    metrics: str
    sequence: int
    preemptions: int
    min_workers: int
    max_workers: int
    paused: bool
    preempted_by: str
    submitter: str
    is_save_requested: bool
    leaves_for: str
    since_unix_ns: int
    stopping: str
    rank_failures: _containers.RepeatedCompositeFieldContainer[RankFailure]
    goodput: _facts_pb2.Goodput
    former: _containers.RepeatedCompositeFieldContainer[FormerWorker]
    def __init__(self, spec: _Optional[_Union[_facts_pb2.JobSpec, _Mapping]] = ..., phase: _Optional[_Union[_facts_pb2.JobPhase, str]] = ..., generation: _Optional[int] = ..., group: _Optional[_Union[_facts_pb2.Group, _Mapping]] = ..., failures: _Optional[int] = ..., losses: _Optional[int] = ..., checkpoints: _Optional[_Iterable[_Union[_facts_pb2.CheckpointRecord, _Mapping]]] = ..., reason: _Optional[str] = ..., failure: _Optional[_Union[_facts_pb2.Failure, _Mapping]] = ..., failed_worker: _Optional[str] = ..., result: _Optional[str] = ..., metrics: _Optional[str] = ..., sequence: _Optional[int] = ..., preemptions: _Optional[int] = ..., min_workers: _Optional[int] = ..., max_workers: _Optional[int] = ..., paused: bool = ..., preempted_by: _Optional[str] = ..., submitter: _Optional[str] = ..., is_save_requested: bool = ..., leaves_for: _Optional[str] = ..., since_unix_ns: _Optional[int] = ..., stopping: _Optional[str] = ..., rank_failures: _Optional[_Iterable[_Union[RankFailure, _Mapping]]] = ..., goodput: _Optional[_Union[_facts_pb2.Goodput, _Mapping]] = ..., former: _Optional[_Iterable[_Union[FormerWorker, _Mapping]]] = ...) -> None: ...
