"""Which snapshot or checkpoint the members of a new group continue from, of a sharded model.

Rule: a function of what all members have sent to all others, so that all choose alike.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic.core.policy.shares import RowRange, cover


class SnapshotKey(NamedTuple):
    """Which snapshot; alike on all nodes that have a part of it.

    Attributes:
        steps, generation, number, tensors: see `SnapshotMark`.
    """

    steps: int
    generation: int
    number: int
    tensors: int


Stretches = Mapping[int, tuple[int, tuple[RowRange, ...]]]
"""Of each sharded tensor, by number: its rows in all, and those that are held."""


NO_ROWS: tuple[int, tuple[RowRange, ...]] = (0, ())


class SnapshotOffer(NamedTuple):
    """A copy of a node's snapshot in the memory of an agent that the reporting member can ask.

    Attributes:
        source: the node whose rows they are.
        address: "host:port" of the agent.
    """

    key: SnapshotKey
    source: str
    address: str
    stretches: Stretches


class SnapshotSource(NamedTuple):
    """Who has rows of a snapshot.

    Attributes:
        rank: of the member that has them, or gets them for all.
        offer: the number of its offer; -1 for its own node's memory.
    """

    rank: int
    offer: int
    stretches: Stretches


@dataclass(frozen=True)
class SnapshotInfo:
    """What a member reports of what could be continued from.

    Attributes:
        snapshots: in its node's memory, with the rows of each.
        checkpoints: (steps, name) in storage, newest first; None if it cannot, or need not, ask.
        offers: copies of other nodes' snapshots.
    """

    snapshots: Mapping[SnapshotKey, Stretches]
    checkpoints: tuple[tuple[int, str], ...] | None
    offers: tuple[SnapshotOffer, ...] = ()

    def to_bytes(self) -> bytes:
        memory = [[list(key), _plain(rows)] for key, rows in self.snapshots.items()]
        offers = [[list(o.key), o.source, o.address, _plain(o.stretches)] for o in self.offers]
        return json.dumps([memory, self.checkpoints, offers]).encode()

    @staticmethod
    def of(text: bytes) -> SnapshotInfo:
        memory, checkpoints, offers = json.loads(text)
        return SnapshotInfo(
            {SnapshotKey(*key): _stretches(rows) for key, rows in memory},
            None if checkpoints is None else tuple((s, name) for s, name in checkpoints),
            tuple(
                SnapshotOffer(SnapshotKey(*key), s, at, _stretches(rows))
                for key, s, at, rows in offers
            ),
        )


def _plain(stretches: Stretches) -> list[object]:
    return [[number, total, held] for number, (total, held) in stretches.items()]


def _stretches(plain: Iterable[tuple[int, int, list[tuple[int, int]]]]) -> Stretches:
    return {number: (total, tuple(RowRange(*one) for one in held)) for number, total, held in plain}


def sources_of(
    key: SnapshotKey, members: Sequence[SnapshotInfo], failed: Collection[tuple[int, int]] = ()
) -> list[SnapshotSource]:
    """Return who together has all rows of a snapshot, members first; none if rows are missing.

    A copy of rows that members have is left where it is.

    Args:
        key: of the snapshot.
        members: what each one has, by rank.
        failed: ranks and numbers of offers that could not be fetched.
    """
    found, rows = [], RowCoverage()
    for rank, one in enumerate(members):
        if key in one.snapshots:
            found.append(SnapshotSource(rank, -1, one.snapshots[key]))
            rows.add(one.snapshots[key])
    offered = sorted(
        (offer.source, offer.address, rank, number)
        for rank, one in enumerate(members)
        for number, offer in enumerate(one.offers)
        if offer.key == key and (rank, number) not in failed
    )
    for _, _, rank, number in offered:
        if rows.is_complete():
            break
        more = SnapshotSource(rank, number, members[rank].offers[number].stretches)
        if rows.add(more.stretches) or not found:
            found.append(more)
    return found if rows.is_complete() else []


class RowCoverage:
    """The rows of a snapshot that some have together: each is checked once, when it is added."""

    def __init__(self) -> None:
        """Begin empty; the first to be added defines which tensors there are, and how large."""
        self._totals: dict[int, int] | None = None
        self._held: dict[int, list[RowRange]] = {}
        self._missing: set[int] = set()

    def add(self, stretches: Stretches) -> bool:
        """Add what a member has; returns whether any of it is new."""
        if self._totals is None:
            self._totals = {number: total for number, (total, _) in stretches.items()}
            self._held = {number: [] for number in self._totals}
            self._missing = {number for number, total in self._totals.items() if total}
        is_new = False
        for number, held in self._held.items():
            fresh = [cover(held, one) for one in stretches.get(number, NO_ROWS)[1]]
            if any(fresh):
                is_new = True
                if held == [RowRange(0, self._totals[number])]:
                    self._missing.discard(number)
                elif self._totals[number]:
                    self._missing.add(number)  # It claims rows that there are none of.
        return is_new

    def is_complete(self) -> bool:
        """Return whether any member was added, and no row is missing."""
        return self._totals is not None and not self._missing


def complete(key: SnapshotKey, members: Sequence[SnapshotInfo]) -> bool:
    """Return whether all rows of a snapshot are in some node's memory."""
    return bool(sources_of(key, members))


def choices(members: Sequence[SnapshotInfo]) -> list[SnapshotKey | str]:
    """Return what could be gone on from, best first: snapshots by key, checkpoints by name.

    What is newest first; memory, if they are equal.
    """
    known = {key for one in members for key in (*one.snapshots, *(o.key for o in one.offers))}
    keys = sorted(key for key in known if complete(key, members))
    listed = next((one.checkpoints for one in members if one.checkpoints is not None), ())
    found: list[tuple[int, int, int, SnapshotKey | str]] = []
    for index, key in enumerate(keys):
        found.append((key.steps, 1, index, key))
    for index, (steps, name) in enumerate(listed):
        found.append((steps, 0, -index, name))
    return [one[3] for one in sorted(found, key=lambda one: one[:3], reverse=True)]
