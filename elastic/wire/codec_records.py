"""Codec of the records in the coordinator's store.

Rule: a record that does not decode, or has another format, raises an error that names its key.
"""

from __future__ import annotations

from elastic.core.records import JobRecord, NodesRecord
from elastic.errors import CorruptRecord, PeerError
from elastic.wire.codec import parse
from elastic.wire.envelope import Envelope
from elastic.wire.generated.elastic.v1 import records_pb2

RECORD_FORMAT = 1
"""Format number in every record; increment it when an older reader would misread newer records."""

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


def decode_record(data: bytes, *, key: str) -> JobRecord:
    """Return the job that is stored under a key.

    Raises:
        CorruptRecord: the record cannot be read; the text names the key and what to do.
    """
    record = _decode(data, key)
    if not isinstance(record, JobRecord):
        raise CorruptRecord(f"the record {key} is about nodes, expected a job; remove this key")
    return record


def decode_nodes(data: bytes, *, key: str) -> NodesRecord:
    """Return the record of nodes that is stored under a key; CorruptRecord as `decode_record`."""
    record = _decode(data, key)
    if not isinstance(record, NodesRecord):
        raise CorruptRecord(f"the record {key} is about a job, expected nodes; remove this key")
    return record


def _decode(data: bytes, key: str) -> Record:
    try:
        stored = parse(records_pb2.StoredRecord, data)
        if stored.format != RECORD_FORMAT:
            raise PeerError(f"format {stored.format}: expected {RECORD_FORMAT}")
        return _RECORD.from_proto(stored)
    except PeerError as error:
        raise CorruptRecord(
            f"the record {key} ({len(data)} bytes) cannot be read: {error}; run the version of "
            f"elastic-torch that wrote it, or remove this key from the store"
        ) from error
