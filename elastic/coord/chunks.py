"""Pieces: values too large for one transaction, split into several keys and joined again.

Rule: all pieces are stored before a record needs them, and no record needs pieces that are being
written or removed. If pieces cannot be joined, the error names the key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.errors import CorruptRecord
from elastic.store.interface import Entry, Put

PIECE_BYTES = 512 * 1024
"""etcd's default limit for a request is 1.5 MiB."""
ENTRY = "entry"
POINTER = b"pieces:"
"""No encoded record has this prefix: its first byte is the tag of field 1."""
PLACE = re.compile(r"([0-9]{4,9})-of-([0-9]{4,9})")


@dataclass
class StoredJob:
    """The stored keys of one job.

    Attributes:
        revision: of its record, 0 before the first.
        labels: keys of the pieces under each label; all of them exist.
        leftover: the same for labels that no record needs; any of them may be missing.
        payload: before the first record, the payload whose pieces are under "entry".
    """

    revision: int = 0
    payload: bytes = b""
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    leftover: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def keys(self) -> list[str]:
        return [
            key for part in (self.labels, self.leftover) for keys in part.values() for key in keys
        ]

    def has(self, label: str, puts: Iterable[Put]) -> None:
        """Record that all pieces under this label exist."""
        self.leftover.pop(label, None)
        self.labels[label] = tuple(put.key for put in puts)

    def keep(self, labels: Iterable[str]) -> None:
        """Record that the job's record needs the pieces of these labels only."""
        needed = {label: self.labels.pop(label) for label in labels if label in self.labels}
        self.leftover |= self.labels
        self.labels = needed


def puts_of(folder: str, data: bytes) -> list[Put]:
    """Return the puts that write `data` as pieces under a key prefix, in order."""
    starts = range(0, len(data), PIECE_BYTES)
    return [
        Put(f"{folder}/{index:04d}-of-{len(starts):04d}", data[start : start + PIECE_BYTES])
        for index, start in enumerate(starts)
    ]


def join(key: str, label: str, pieces: Iterable[Entry], *, may_lack: bool = False) -> bytes:
    """Join pieces in the order of their keys; raise CorruptRecord if one is missing or changed."""
    there = list(pieces)
    if not there and may_lack:
        return b""
    places = [_place(piece.key) for piece in there]
    total = places[0][1] if places else 1
    if places != [(index, total) for index in range(total)]:
        raise CorruptRecord(
            f"record {key}: {len(there)} of {total} pieces of its {label!r} part exist; remove "
            f"this key from the store to continue without the job"
        )
    data = b"".join(piece.value for piece in there)
    if label not in (ENTRY, label_of(data)):
        raise CorruptRecord(
            f"record {key}: the pieces of its {label!r} part were changed; remove this key from "
            f"the store to continue without the job"
        )
    return data


def pointed(data: bytes) -> str:
    """Return the label of the pieces that a record's value points to, "" if it is the record."""
    if not data.startswith(POINTER):
        return ""
    return data.removeprefix(POINTER).partition(b":")[0].decode("ascii", "replace")


def label_of(data: bytes) -> str:
    """Return the label of the pieces that a record is split into."""
    return hashlib.sha256(data).hexdigest()[:32]


def _place(key: str) -> tuple[int, int]:
    """Return (index, number of pieces) from a piece's key.

    Raises:
        CorruptRecord: it is not the key of a piece.
    """
    match = PLACE.fullmatch(key.rpartition("/")[2])
    if match is None:
        raise CorruptRecord(f"key {key} is no piece of a record; remove it")
    return int(match[1]), int(match[2])
