"""The codec knows every field of every fact, and refuses by name what it does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, get_args

import pytest

from elastic.core import messages, view, world
from elastic.core.config import ENTRY_BYTES_MAX, JobSpec
from elastic.core.events.coordinator import JobRecord
from elastic.core.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AgentMessage,
    Assign,
    CoordinatorMessage,
    Hello,
    PipeToAgent,
    PipeToWorker,
    StartWorker,
    WorkerUpdate,
)
from elastic.core.world import (
    Entry,
    EntryKind,
    Failure,
    JobId,
    JobPhase,
    Node,
    NodeId,
    Resources,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.errors import ConfigError, CorruptRecord, InvariantViolation, PeerError
from elastic.wire.codec import MESSAGE_BYTES_MAX, Codec
from elastic.wire.codec_jobs import job_event_from_proto, log_chunk_from_proto, spec_of
from elastic.wire.codec_records import RECORD_FORMAT, decode_record, encode_record
from elastic.wire.codec_stream import (
    ATTACH_METHOD,
    agent_message_from_proto,
    decode_agent_message,
    decode_coordinator_message,
    decode_from_worker,
    decode_to_worker,
    encode_agent_message,
    encode_coordinator_message,
    encode_from_worker,
    encode_to_worker,
)
from elastic.wire.frames import FRAME_BYTES_MAX, encode_frame
from elastic.wire.generated.elastic.v1 import (
    agent_pb2,
    facts_pb2,
    jobs_pb2,
    records_pb2,
    worker_pb2,
)
from tests.strategies import SCRIPT

PROTOS = [module.DESCRIPTOR for module in (facts_pb2, worker_pb2, agent_pb2, records_pb2, jobs_pb2)]
DESCRIBED = {
    name: described for proto in PROTOS for name, described in proto.message_types_by_name.items()
}
ENUMS = {
    name: described for proto in PROTOS for name, described in proto.enum_types_by_name.items()
}
ON_THE_WIRE = {"JobView": "Job", "since_ns": "age_ns"}
NOT_SENT_AS_ONE = {"ClusterView"}
SPEC = JobSpec(job_id=JobId("j1"), name="digits", entry=SCRIPT, min_workers=1, max_workers=2)
REPORT = WorkerReport(WorkerId("n1/1"), JobId("j1"), WorkerPhase.READY)
HELLO = Hello(Node(NodeId("n1"), incarnation=1, host="127.0.0.1", num_slots=2), (REPORT,))


def dataclasses_of(*modules: Any) -> Iterator[type[Any]]:
    for module in modules:
        for value in vars(module).values():
            if dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
                yield value  # type: ignore[misc]


@pytest.mark.parametrize(
    "fact",
    [*dataclasses_of(world, messages, view), JobSpec, JobRecord],
    ids=lambda fact: fact.__name__,
)
def test_every_field_of_every_fact_has_its_place_on_the_wire(fact: type[Any]) -> None:
    if fact.__name__ in NOT_SENT_AS_ONE:
        return
    described = DESCRIBED[ON_THE_WIRE.get(fact.__name__, fact.__name__)]
    fields = [ON_THE_WIRE.get(field.name, field.name) for field in dataclasses.fields(fact)]
    assert sorted(field.name for field in described.fields) == sorted(fields)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(world).values() if isinstance(kind, type) and issubclass(kind, Enum)],
    ids=lambda kind: kind.__name__,
)
def test_every_value_of_every_enum_has_a_number(kind: type[Enum]) -> None:
    if kind is Enum:
        return
    names = {value.name: value.number for value in ENUMS[kind.__name__].values}
    prefix = next(name for name, number in names.items() if number == 0).removesuffix("UNSPECIFIED")
    assert sorted(names) == sorted([f"{prefix}UNSPECIFIED", *(prefix + each.name for each in kind)])


@pytest.mark.parametrize(
    ("envelope", "bodies"),
    [
        ("AgentToCoordinator", AgentMessage),
        ("CoordinatorToAgent", CoordinatorMessage),
        ("PipeToWorker", PipeToWorker),
        ("PipeToAgent", PipeToAgent),
    ],
)
def test_every_message_has_an_envelope(envelope: str, bodies: Any) -> None:
    found = {field.message_type.name for field in DESCRIBED[envelope].oneofs[0].fields}
    assert found == {body.__name__ for body in get_args(bodies)}


def test_the_streams_name_is_that_of_the_service() -> None:
    service = agent_pb2.DESCRIPTOR.services_by_name["Agents"]
    assert f"/{service.full_name}/{service.methods[0].name}" == ATTACH_METHOD


@dataclass(frozen=True)
class Pong:
    """As `messages.Pong`, with a field that the wire does not know."""

    number: int
    forgotten: str = ""


@dataclass(frozen=True)
class Ping:
    """As `messages.Ping`, with a number that became a text."""

    number: str


@pytest.mark.parametrize(
    ("fact", "told"), [(Pong, r"differ in \['forgotten'\]"), (Ping, "Ping.number: its type")]
)
def test_a_dataclass_that_left_its_message_behind_stops_the_import(
    fact: type[Any], told: str
) -> None:
    with pytest.raises(InvariantViolation, match=told):
        Codec(fact, DESCRIBED[fact.__name__])


# ------------------------------------------------------------------------------ refusals


def changed(change: Callable[[agent_pb2.AgentToCoordinator], object]) -> bytes:
    """Bytes of HELLO after a change that our own encoder would not make."""
    proto = agent_pb2.AgentToCoordinator.FromString(encode_agent_message(HELLO))
    change(proto)
    return proto.SerializeToString()


def without_phase(proto: agent_pb2.AgentToCoordinator) -> None:
    proto.hello.workers[0].phase = facts_pb2.WORKER_PHASE_UNSPECIFIED


def with_newer_phase(proto: agent_pb2.AgentToCoordinator) -> None:
    proto.hello.workers[0].ClearField("phase")
    proto.hello.workers[0].MergeFromString(bytes([3 << 3, 99]))


def of_other_major(proto: agent_pb2.AgentToCoordinator) -> None:
    proto.hello.protocol_major = 7
    with_newer_phase(proto)


@pytest.mark.parametrize(
    ("decode", "data", "told"),
    [
        (decode_agent_message, b"", "AgentToCoordinator without a body.*hello, worker_update"),
        (decode_coordinator_message, b"", "CoordinatorToAgent without a body"),
        (decode_to_worker, b"", "PipeToWorker without a body"),
        (decode_from_worker, b"", "PipeToAgent without a body"),
        # Field 99 is a body of some newer minor version.
        (
            decode_agent_message,
            b"\x9a\x06\x00",
            f"body that protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR} knows",
        ),
        (decode_agent_message, b"\x0a\x05ab", "4 bytes do not read as elastic.v1.AgentToCo"),
        (decode_agent_message, b"GET / HTTP/1.1", "does the other side run elastic-torch"),
        # A name that is not UTF-8.
        (decode_agent_message, b"\x0a\x04\x0a\x02\x0a\x00\xff", "do not read as"),
        (decode_agent_message, b"\x0a\x00", "Hello.node is missing"),
        (decode_agent_message, b"\x12\x00", "WorkerUpdate.report is missing"),
        (decode_agent_message, b"\x1a\x00", "Reported.report is missing"),
        (decode_coordinator_message, b"\x1a\x00", "StartWorker.spec is missing"),
        (decode_to_worker, b"\x12\x00", "Announce.assignment is missing"),
        (decode_agent_message, changed(without_phase), "WorkerReport.phase=0: expected 1 to 7"),
        (decode_agent_message, changed(with_newer_phase), "WorkerReport.phase=99: expected 1 to 7"),
        (decode_agent_message, changed(of_other_major), "speaks protocol 7.*phase=99"),
    ],
)
def test_what_is_no_message_is_refused_by_name(
    decode: Callable[[bytes], Any], data: bytes, told: str
) -> None:
    with pytest.raises(PeerError, match=told):
        decode(data)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("name", "../../etc", "JobSpec refused: job name '../../etc'"),
        ("min_workers", 9, "min_workers=9 and max_workers=2"),
        ("backend", "mpi", "backend='mpi': expected auto, gloo or nccl"),
        ("collective_timeout_s", -1.0, "collective_timeout_s=-1.0"),
        ("max_failures", -2, "max_failures=-2"),
        ("score_order", "", "score_order=''"),
    ],
)
def test_what_a_fact_refuses_the_codec_refuses(field: str, value: Any, told: str) -> None:
    data = encode_to_worker(Assign(WorkerId("n1/1"), SPEC, "127.0.0.1"))
    request = jobs_pb2.SubmitRequest()
    request.spec.MergeFrom(facts_pb2.JobSpec.FromString(spec_bytes(data)))
    assert spec_of(request) == SPEC
    setattr(request.spec, field, value)
    with pytest.raises(PeerError, match=told):
        spec_of(request)


def spec_bytes(assign: bytes) -> bytes:
    data: bytes = worker_pb2.PipeToWorker.FromString(assign).assign.spec.SerializeToString()
    return data


def test_a_request_without_a_specification_is_refused() -> None:
    with pytest.raises(PeerError, match=r"SubmitRequest\.spec is missing"):
        spec_of(jobs_pb2.SubmitRequest())


def test_an_event_without_a_body_is_refused() -> None:
    with pytest.raises(PeerError, match="JobEvent without a body"):
        job_event_from_proto(jobs_pb2.JobEvent(), 0)


def test_an_absent_amount_of_resources_means_none() -> None:
    def strip(proto: agent_pb2.AgentToCoordinator) -> None:
        proto.hello.node.ClearField("resources")

    hello = decode_agent_message(changed(strip))
    assert isinstance(hello, Hello)
    assert hello.node.resources == Resources()


def test_a_newer_minor_version_may_add_fields() -> None:
    proto = agent_pb2.AgentToCoordinator.FromString(encode_agent_message(HELLO))
    proto.hello.protocol_minor = 5
    proto.hello.MergeFromString(b"\x9a\x06\x03abc")
    assert agent_message_from_proto(proto) == replace(HELLO, protocol_minor=5)


def test_empty_output_is_a_chunk_like_any_other() -> None:
    assert log_chunk_from_proto(jobs_pb2.LogChunk()).text == ""


# ------------------------------------------------------------------------------ sending


def test_the_largest_job_fits_into_a_message_and_a_frame() -> None:
    entry = Entry(EntryKind.FUNCTION, "train", payload=bytes(ENTRY_BYTES_MAX))
    data = encode_to_worker(Assign(WorkerId("n1/1"), replace(SPEC, entry=entry), "127.0.0.1"))
    assert len(encode_frame(data)) < FRAME_BYTES_MAX == MESSAGE_BYTES_MAX


def test_text_for_people_is_escaped_where_it_is_no_unicode() -> None:
    failure = Failure("OSError", "no file 'caf\udce9'", "Traceback \ud800")
    update = decode_from_worker(encode_from_worker(WorkerUpdate(replace(REPORT, failure=failure))))
    assert isinstance(update, WorkerUpdate)
    assert update.report.failure == Failure("OSError", r"no file 'caf\udce9'", r"Traceback \ud800")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            WorkerUpdate(replace(REPORT, generation=-1)),
            r"WorkerReport\.generation=-1 cannot be sent",
        ),
        (
            WorkerUpdate(replace(REPORT, generation=2**64)),
            r"generation=18446744073709551616 cannot",
        ),
        (WorkerUpdate(replace(REPORT, pid=2**31)), r"WorkerReport\.pid=2147483648 cannot be sent"),
        (WorkerUpdate(replace(REPORT, store_address="\udcff:1")), "expected Unicode text"),
    ],
)
def test_what_cannot_travel_is_refused_before_it_is_sent(message: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        encode_agent_message(message)


@pytest.mark.parametrize(
    "entry",
    [
        Entry(EntryKind.SCRIPT, "caf\udce9.py"),
        Entry(EntryKind.SCRIPT, "train.py", args=("caf\udce9",)),
        Entry(EntryKind.SCRIPT, "train.py", env=(("HOME", "caf\udce9"),)),
    ],
    ids=["target", "args", "env"],
)
def test_a_path_or_argument_that_is_no_unicode_is_refused_and_not_changed(entry: Entry) -> None:
    with pytest.raises(ConfigError, match="caf"):
        encode_to_worker(Assign(WorkerId("n1/1"), replace(SPEC, entry=entry), "127.0.0.1"))


# ------------------------------------------------------------------------------ records

RECORD = JobRecord(SPEC, JobPhase.PENDING)


def of_newer_format() -> bytes:
    stored = records_pb2.StoredRecord.FromString(encode_record(RECORD))
    stored.format = RECORD_FORMAT + 1
    return stored.SerializeToString()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "format 0: expected 1 to 1"),
        (b"\x08\x01", "StoredRecord without a body"),
        (b"\x08\x01\x12\x00", r"JobRecord\.spec is missing"),
        (of_newer_format(), "format 2: expected 1 to 1"),
        (encode_record(RECORD)[:-1], "do not read as"),
        (b'{"json": 1}', "do not read as"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_by_its_key(data: bytes, told: str) -> None:
    with pytest.raises(CorruptRecord, match=rf"record jobs/7 .*{told}.*remove this key"):
        decode_record(data, key="jobs/7")


def test_a_worker_is_started_with_the_payload() -> None:
    entry = Entry(EntryKind.FUNCTION, "train", payload=b"pickled")
    start = StartWorker(WorkerId("n1/1"), replace(SPEC, entry=entry))
    assert decode_coordinator_message(encode_coordinator_message(start)) == start


def test_a_job_that_many_are_told_of_is_written_the_same_for_each_of_them() -> None:
    other = replace(SPEC, name="other", priority=7)
    orders = [
        StartWorker(WorkerId(f"n1/{number}"), job)
        for number, job in enumerate((SPEC, SPEC, other, SPEC, other, other), start=1)
    ]
    assert [decode_coordinator_message(encode_coordinator_message(o)) for o in orders] == orders


def test_a_wide_part_is_read_as_it_was_whatever_was_written_before_it() -> None:
    first = world.Assignment(
        job_id=JobId("j"),
        worker_id=WorkerId("n1/1"),
        generation=3,
        rank=1,
        world_size=2,
        local_rank=0,
        local_world_size=1,
        node_rank=1,
        num_nodes=2,
        leader_address="h:1",
        checkpoint="/c",
        copies=("a:1", "b:2"),
        copies_dealt=True,
    )
    orders = [
        messages.Announce(one)
        for one in (
            first,
            replace(first, worker_id=WorkerId("n2/1"), rank=0, node_rank=0),
            replace(first, copies=("c:3",), copies_fingerprints=("f",)),
            replace(first, copies=(), checkpoint="", copies_dealt=False),
            first,
        )
    ]
    for order in orders:
        assert decode_coordinator_message(encode_coordinator_message(order)) == order
        wrong = messages.Announce(replace(first, copies=("x:1",), generation=-(2**70)))
        with pytest.raises(ConfigError, match="generation"):
            encode_coordinator_message(wrong)
