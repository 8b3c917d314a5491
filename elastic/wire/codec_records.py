"""What the coordinator keeps in its store, as bytes.

Rule: a record that does not decode, or was written by a newer version, is refused by its key.
"""

from __future__ import annotations

from elastic.core.events.coordinator import JobRecord
from elastic.errors import CorruptRecord, PeerError
from elastic.wire.codec import parse
from elastic.wire.envelope import Envelope
from elastic.wire.generated.elastic.v1 import records_pb2

RECORD_FORMAT = 1
"""Written into every record; to be raised when an older reader would misread a newer record."""

_RECORD: Envelope[JobRecord, records_pb2.StoredRecord] = Envelope(
    records_pb2.StoredRecord, (JobRecord,)
)


def encode_record(record: JobRecord) -> bytes:
    """Return a record as it is stored.

    Raises:
        ConfigError: a value cannot be stored (a number out of range, a path that is not Unicode).
    """
    stored = _RECORD.to_proto(record)
    stored.format = RECORD_FORMAT
    return stored.SerializeToString()


def decode_record(data: bytes, *, key: str) -> JobRecord:
    """Return the record that is stored under a key.

    Raises:
        CorruptRecord: it cannot be read; the text names the key and says what to do.
    """
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
