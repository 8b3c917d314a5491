"""What one process says, another one reads; what is no message is refused, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.core.view import ClusterView, JobView
from elastic.errors import CorruptRecord, PeerError
from elastic.wire import codec_stream
from elastic.wire.codec import parse
from elastic.wire.codec_jobs import (
    ClusterStatus,
    LogChunk,
    TimedNote,
    job_event_from_proto,
    job_event_to_proto,
    job_from_proto,
    job_to_proto,
    log_chunk_from_proto,
    log_chunk_to_proto,
    spec_of,
    status_from_proto,
    status_to_proto,
    submit_request,
    without_secrets,
)
from elastic.wire.codec_records import decode_record, encode_record
from elastic.wire.frames import FrameReader, encode_frame
from elastic.wire.generated.elastic.v1 import jobs_pb2
from tests.effort import examples
from tests.strategies import (
    AGENT_MESSAGES,
    CLUSTER_VIEWS,
    COORDINATOR_MESSAGES,
    FROM_WORKER,
    JOB_VIEWS,
    NOTES,
    RECORDS,
    SPECS,
    TO_WORKER,
    facts,
)

# Drawing a whole cluster is slow by nature; how long it takes is not what is tested.
patient = settings(
    max_examples=examples(30),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MOMENTS = st.integers(0, 2**62)


@patient
@given(AGENT_MESSAGES)
def test_the_coordinator_reads_what_an_agent_says(message: Any) -> None:
    data = codec_stream.FROM_AGENT.encode(message)
    assert codec_stream.FROM_AGENT.decode(data) == message


@patient
@given(COORDINATOR_MESSAGES)
def test_an_agent_reads_what_the_coordinator_says(message: Any) -> None:
    data = codec_stream.TO_AGENT.encode(message)
    assert codec_stream.TO_AGENT.decode(data) == message


@patient
@given(TO_WORKER)
def test_a_worker_reads_what_its_agent_says(message: Any) -> None:
    assert codec_stream.TO_WORKER.decode(codec_stream.TO_WORKER.encode(message)) == message


@patient
@given(FROM_WORKER)
def test_an_agent_reads_what_its_worker_says(message: Any) -> None:
    assert codec_stream.FROM_WORKER.decode(codec_stream.FROM_WORKER.encode(message)) == message


@patient
@given(RECORDS)
def test_a_record_is_read_as_it_was_stored(record: Any) -> None:
    assert decode_record(encode_record(record), key="jobs/1") == record


@patient
@given(SPECS)
def test_a_submitted_specification_arrives_whole(spec: Any) -> None:
    assert spec_of(submit_request(spec)) == spec


@patient
@given(JOB_VIEWS, MOMENTS)
def test_a_shown_job_is_whole_but_for_its_secrets(job: JobView, now_ns: int) -> None:
    shown = job_from_proto(job_to_proto(job, now_ns), now_ns)
    assert shown == without_secrets(job)
    entry, group = shown.record.spec.entry, shown.record.group
    assert entry.payload == b""
    assert {value for _, value in entry.env} <= {"***"}
    assert [name for name, _ in entry.env] == [name for name, _ in job.record.spec.entry.env]
    assert group is None or group.key == ""


@patient
@given(JOB_VIEWS, MOMENTS, st.integers(0, 2**40))
def test_ages_are_counted_back_from_the_readers_own_clock(
    job: JobView, now_ns: int, ahead_ns: int
) -> None:
    shown = job_from_proto(job_to_proto(job, now_ns), now_ns + ahead_ns)
    assert shown.since_ns == job.since_ns + ahead_ns
    assert [worker.since_ns - ahead_ns for worker in shown.workers] == [
        worker.since_ns for worker in job.workers
    ]


@patient
@given(st.one_of(JOB_VIEWS, st.builds(TimedNote, NOTES, MOMENTS)), MOMENTS)
def test_a_watcher_reads_what_happened(event: JobView | TimedNote, now_ns: int) -> None:
    expected = without_secrets(event) if isinstance(event, JobView) else event
    assert job_event_from_proto(job_event_to_proto(event, now_ns), now_ns) == expected


@patient
@given(facts(LogChunk))
def test_followers_read_what_a_worker_wrote(chunk: LogChunk) -> None:
    assert log_chunk_from_proto(log_chunk_to_proto(chunk)) == chunk


@patient
@given(CLUSTER_VIEWS, MOMENTS)
def test_an_operator_sees_the_cluster_as_it_is(view: ClusterView, uptime_ns: int) -> None:
    there = ("10.0.0.1:7070", "10.0.0.2:7070")
    status = ClusterStatus("coord-1", "0.1.0", "1.0", "memory:", uptime_ns, view, "", there)
    shown = status_from_proto(status_to_proto(status), view.now_ns)
    assert (shown.view.nodes, shown.view.cordons) == (view.nodes, view.cordons)
    assert shown.coordinators == there
    assert shown.view.jobs == tuple(without_secrets(job) for job in view.jobs)
    assert (shown.coordinator, shown.version, shown.protocol) == ("coord-1", "0.1.0", "1.0")
    assert (shown.store, shown.uptime_ns, shown.view.now_ns) == ("memory:", uptime_ns, view.now_ns)


# ------------------------------------------------------------------------------ nonsense


def read_watched(data: bytes) -> Any:
    return job_event_from_proto(parse(jobs_pb2.JobEvent, data), 0)


READERS: list[tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any], type[Exception]]] = [
    (AGENT_MESSAGES, codec_stream.FROM_AGENT.encode, codec_stream.FROM_AGENT.decode, PeerError),
    (COORDINATOR_MESSAGES, codec_stream.TO_AGENT.encode, codec_stream.TO_AGENT.decode, PeerError),
    (TO_WORKER, codec_stream.TO_WORKER.encode, codec_stream.TO_WORKER.decode, PeerError),
    (FROM_WORKER, codec_stream.FROM_WORKER.encode, codec_stream.FROM_WORKER.decode, PeerError),
    (RECORDS, encode_record, lambda data: decode_record(data, key="jobs/1"), CorruptRecord),
    (
        JOB_VIEWS,
        lambda job: job_event_to_proto(job, 0).SerializeToString(),
        read_watched,
        PeerError,
    ),
]
each_reader = pytest.mark.parametrize(
    ("messages", "encode", "decode", "refusal"),
    READERS,
    ids=["from-agent", "to-agent", "to-worker", "from-worker", "record", "watched"],
)


@each_reader
@patient
@given(data=st.data())
def test_damaged_bytes_are_refused_or_mean_something(
    messages: Any,
    encode: Callable[[Any], bytes],
    decode: Callable[[bytes], Any],
    refusal: type[Exception],
    data: st.DataObject,
) -> None:
    damaged = bytearray(encode(data.draw(messages)))
    for _ in range(data.draw(st.integers(1, 4), label="changes")):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    kept = data.draw(st.integers(0, len(damaged)), label="kept bytes")
    piece = bytes(damaged[:kept]) if data.draw(st.booleans(), label="cut") else bytes(damaged)
    # Equality would fail for a damaged float that became NaN: that it can be said again is enough.
    with contextlib.suppress(refusal):
        encode(decode(piece))


@each_reader
@patient
@given(piece=st.binary(max_size=200))
def test_any_bytes_are_refused_or_mean_something(
    messages: Any,
    encode: Callable[[Any], bytes],
    decode: Callable[[bytes], Any],
    refusal: type[Exception],
    piece: bytes,
) -> None:
    with contextlib.suppress(refusal):
        encode(decode(piece))


@patient
@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.data())
def test_frames_do_not_depend_on_how_the_stream_was_cut(
    payloads: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(payload) for payload in payloads)
    reader = FrameReader()
    found = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:size])
        stream = stream[size:]
    reader.end()
    assert found == payloads
