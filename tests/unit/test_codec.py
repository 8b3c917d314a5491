"""The codec knows every field of every fact, and refuses by name what it does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, get_args

import pytest

from elastic.core import facts, messages, view
from elastic.core.config import JobSpec
from elastic.core.facts import (
    Entry,
    EntryKind,
    Failure,
    JobId,
    Node,
    NodeId,
    Resources,
    WorkerId,
    WorkerPhase,
    WorkerReport,
)
from elastic.core.messages import (
    PROTOCOL,
    AgentMessage,
    Assign,
    CoordinatorMessage,
    Hello,
    PipeToAgent,
    PipeToWorker,
    WorkerUpdate,
)
from elastic.core.records import JobRecord
from elastic.errors import ConfigError, InvariantViolation, PeerError
from elastic.wire.codec import MessageCodec
from elastic.wire.codec_jobs import spec_of
from elastic.wire.codec_stream import ATTACH_METHOD, FROM_AGENT, FROM_WORKER, TO_AGENT, TO_WORKER
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
NOT_SENT_AS_ONE = {"ClusterView", "JobSample"}
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
    [*dataclasses_of(facts, messages, view), JobSpec, JobRecord],
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
    [kind for kind in vars(facts).values() if isinstance(kind, type) and issubclass(kind, Enum)],
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
    times: int = 1
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
        MessageCodec(fact, DESCRIBED[fact.__name__])


# ------------------------------------------------------------------------------ refusals


def changed(change: Callable[[agent_pb2.AgentToCoordinator], object]) -> bytes:
    """Bytes of HELLO after a change that our own encoder would not make."""
    proto = agent_pb2.AgentToCoordinator.FromString(FROM_AGENT.encode(HELLO))
    change(proto)
    return proto.SerializeToString()


def without_phase(proto: agent_pb2.AgentToCoordinator) -> None:
    proto.hello.workers[0].phase = facts_pb2.WORKER_PHASE_UNSPECIFIED


def with_newer_phase(proto: agent_pb2.AgentToCoordinator) -> None:
    proto.hello.workers[0].ClearField("phase")
    proto.hello.workers[0].MergeFromString(bytes([3 << 3, 99]))


@pytest.mark.parametrize(
    ("decode", "data", "told"),
    [
        (FROM_AGENT.decode, b"", "AgentToCoordinator without a body.*hello, worker_update"),
        (TO_AGENT.decode, b"", "CoordinatorToAgent without a body"),
        (TO_WORKER.decode, b"", "PipeToWorker without a body"),
        (FROM_WORKER.decode, b"", "PipeToAgent without a body"),
        # Field 99 is no body that we know.
        (FROM_AGENT.decode, b"\x9a\x06\x00", f"body that protocol {PROTOCOL} knows"),
        (FROM_AGENT.decode, b"\x0a\x05ab", "4 bytes do not read as elastic.v1.AgentToCo"),
        (FROM_AGENT.decode, b"GET / HTTP/1.1", "does the other side run elastic-torch"),
        # A name that is not UTF-8.
        (FROM_AGENT.decode, b"\x0a\x04\x0a\x02\x0a\x00\xff", "do not read as"),
        (FROM_AGENT.decode, b"\x0a\x00", "Hello.node is missing"),
        (FROM_AGENT.decode, b"\x12\x00", "WorkerUpdate.report is missing"),
        (FROM_AGENT.decode, b"\x1a\x00", "Reported.report is missing"),
        (TO_AGENT.decode, b"\x1a\x00", "StartWorker.spec is missing"),
        (TO_WORKER.decode, b"\x12\x00", "Announce.assignment is missing"),
        (FROM_AGENT.decode, changed(without_phase), "WorkerReport.phase=0: expected 1 to 7"),
        (FROM_AGENT.decode, changed(with_newer_phase), "WorkerReport.phase=99: expected 1 to 7"),
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
    data = TO_WORKER.encode(Assign(WorkerId("n1/1"), SPEC, "127.0.0.1"))
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


def test_an_absent_amount_of_resources_means_none() -> None:
    def strip(proto: agent_pb2.AgentToCoordinator) -> None:
        proto.hello.node.ClearField("resources")

    hello = FROM_AGENT.decode(changed(strip))
    assert isinstance(hello, Hello)
    assert hello.node.resources == Resources()


# ------------------------------------------------------------------------------ sending


def test_text_for_people_is_escaped_where_it_is_no_unicode() -> None:
    failure = Failure("OSError", "no file 'caf\udce9'", "Traceback \ud800")
    update = FROM_WORKER.decode(FROM_WORKER.encode(WorkerUpdate(replace(REPORT, failure=failure))))
    assert isinstance(update, WorkerUpdate)
    assert update.report.failure == Failure("OSError", r"no file 'caf\udce9'", r"Traceback \ud800")


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
        TO_WORKER.encode(Assign(WorkerId("n1/1"), replace(SPEC, entry=entry), "127.0.0.1"))
