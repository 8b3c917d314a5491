"""Pieces: what is too large for one transaction, cut into several keys and put together again.

Rule: pieces are there, all of them, before a record needs them, and no record needs what is being
written or removed; what cannot be put together is refused by its key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.errors import CorruptRecord
from elastic.store.interface import Entry, Put

PIECE_BYTES = 512 * 1024
"""etcd refuses requests above 1.5 MiB unless told otherwise."""
ENTRY = "entry"
POINTER = b"pieces:"
"""No encoded record begins so: its first byte is the tag of field 1."""
PLACE = re.compile(r"([0-9]{4,9})-of-([0-9]{4,9})")


@dataclass
class StoredJob:
    """What the store holds of one job.

    Attributes:
        revision: of its record, 0 before the first.
        labels: keys of the pieces under each label; all of them are there.
        leftover: the same of labels that no record needs; some of them may be there, or none.
        payload: before the first record, what the pieces under "entry" are of.
    """

    revision: int = 0
    payload: bytes = b""
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    leftover: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def keys(self) -> list[str]:
        """Return the keys of all pieces that may be there."""
        return [
            key for part in (self.labels, self.leftover) for keys in part.values() for key in keys
        ]

    def has(self, label: str, puts: Iterable[Put]) -> None:
        """All pieces under this label are there."""
        self.leftover.pop(label, None)
        self.labels[label] = tuple(put.key for put in puts)

    def keep(self, labels: Iterable[str]) -> None:
        """The record needs the pieces under these labels, and no others."""
        needed = {label: self.labels.pop(label) for label in labels if label in self.labels}
        self.leftover |= self.labels
        self.labels = needed


def puts_of(folder: str, data: bytes) -> list[Put]:
    """Return what writes `data` as pieces under a folder, in their order."""
    starts = range(0, len(data), PIECE_BYTES)
    return [
        Put(f"{folder}/{index:04d}-of-{len(starts):04d}", data[start : start + PIECE_BYTES])
        for index, start in enumerate(starts)
    ]


def join(key: str, label: str, pieces: Iterable[Entry], *, may_lack: bool = False) -> bytes:
    """Put pieces together, in the order of their keys; a missing one is refused by name."""
    there = list(pieces)
    if not there and may_lack:
        return b""
    places = [_place(piece.key) for piece in there]
    total = places[0][1] if places else 1
    if places != [(index, total) for index in range(total)]:
        raise CorruptRecord(
            f"record {key}: {len(there)} of {total} pieces of its {label!r} part exist; remove "
            f"this key from the store to go on without the job"
        )
    data = b"".join(piece.value for piece in there)
    if label not in (ENTRY, label_of(data)):
        raise CorruptRecord(
            f"record {key}: the pieces of its {label!r} part were changed; remove this key from "
            f"the store to go on without the job"
        )
    return data


def pointed(data: bytes) -> str:
    """Return the label of the pieces that a record's key points to, "" if it holds the record."""
    if not data.startswith(POINTER):
        return ""
    return data.removeprefix(POINTER).partition(b":")[0].decode("ascii", "replace")


def label_of(data: bytes) -> str:
    """Return the label of the pieces that a record is split into."""
    return hashlib.sha256(data).hexdigest()[:32]


def _place(key: str) -> tuple[int, int]:
    """Return (index, number of pieces) that a piece's key states.

    Raises:
        CorruptRecord: it states none.
    """
    match = PLACE.fullmatch(key.rpartition("/")[2])
    if match is None:
        raise CorruptRecord(f"key {key} is no piece of a record; remove it")
    return int(match[1]), int(match[2])
