"""What the coordinator keeps in its store, as bytes.

Rule: a record that does not decode, or has a newer format, is refused by its key; fields that a
newer minor version added within the format are kept as they are.
"""

from __future__ import annotations

from google.protobuf.message import Message

from elastic.core.events.coordinator import JobRecord, NodesRecord
from elastic.errors import CorruptRecord, PeerError
from elastic.wire.codec import parse
from elastic.wire.envelope import Envelope
from elastic.wire.generated.elastic.v1 import records_pb2

RECORD_FORMAT = 1
"""Written into every record; to be raised when an older reader would misread a newer record."""

Record = JobRecord | NodesRecord
_RECORD: Envelope[Record, records_pb2.StoredRecord] = Envelope(
    records_pb2.StoredRecord, (JobRecord, NodesRecord)
)


def encode_record(record: Record) -> bytes:
    """Return a record as it is stored.

    Raises:
        ConfigError: a value cannot be stored (a number out of range, a path that is not Unicode).
    """
    stored = _RECORD.to_proto(record)
    stored.format = RECORD_FORMAT
    return stored.SerializeToString()


def unknown_of(data: bytes) -> bytes:
    """Return the fields of a stored record that this version does not know, to be put behind it.

    A newer minor version wrote them: two versions may share a store while a cluster is upgraded,
    and the older one must not lose what the newer keeps. Only where a record has one value for
    its whole life: beside a job's own fields, in its specification, and beside those of nodes.

    Args:
        data: a record that `decode_record` or `decode_nodes` reads.

    Returns:
        Bytes to append to `encode_record`; protobuf reads two encodings in a row as one message.
    """
    stored = records_pb2.StoredRecord.FromString(data)
    kept = records_pb2.StoredRecord()
    if spec := _bare(stored.job_record.spec):
        kept.job_record.spec.MergeFromString(spec)
    if record := _bare(stored.job_record):
        kept.job_record.MergeFromString(record)
    if nodes := _bare(stored.nodes_record):
        kept.nodes_record.MergeFromString(nodes)
    kept.MergeFromString(_bare(stored))
    return kept.SerializeToString()


def _bare(message: Message) -> bytes:
    """Return only what is unknown in a message, itself and not what is in it."""
    copy = type(message)()
    copy.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        copy.ClearField(field.name)
    return copy.SerializeToString()


def decode_record(data: bytes, *, key: str) -> JobRecord:
    """Return the job that is stored under a key.

    Raises:
        CorruptRecord: it cannot be read; the text names the key and says what to do.
    """
    record = _decode(data, key)
    if not isinstance(record, JobRecord):
        raise CorruptRecord(f"the record {key} is about nodes, expected a job; remove this key")
    return record


def decode_nodes(data: bytes, *, key: str) -> NodesRecord:
    """Return what is stored of nodes.

    Raises:
        CorruptRecord: as `decode_record`.
    """
    record = _decode(data, key)
    if not isinstance(record, NodesRecord):
        raise CorruptRecord(f"the record {key} is about a job, expected nodes; remove this key")
    return record


def _decode(data: bytes, key: str) -> Record:
    try:
        stored = parse(records_pb2.StoredRecord, data)
        if not 1 <= stored.format <= RECORD_FORMAT:
            raise PeerError(f"format {stored.format}: expected 1 to {RECORD_FORMAT}")
        return _RECORD.from_proto(stored)
    except PeerError as error:
        raise CorruptRecord(
            f"the record {key} ({len(data)} bytes) cannot be read: {error}; run the version of "
            f"elastic-torch that wrote it, or remove this key from the store"
        ) from error
