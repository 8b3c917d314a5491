"""Simulated subgroups of a group: two ranks share the shards of a model, others have replicas.

Rule: ranks 2k and 2k + 1 are a pair, which synchronizes first in each step; then ranks of the same
parity do. A wait within a pair cannot be observed: the waiting rank looks as if it hung.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic.core.facts import CollectiveCount

PAIR = 2


@dataclass(frozen=True)
class Spot:
    """The place of a main thread while its group makes no step.

    Attributes:
        begun: counts of started collectives in subgroups.
        is_hidden: it waits, but looks as if it hung.
    """

    begun: tuple[CollectiveCount, ...] = ()
    is_hidden: bool = False


OPEN = Spot()


class Rank(Protocol):
    """A process of a group."""

    spot: Spot

    def moves(self) -> bool:
        """Return whether its main thread makes progress."""

    def is_slow(self) -> bool:
        """Return whether its step takes longer than the others'."""


def stall(members: Mapping[int, Rank], step: int) -> None:
    """Set the place of each member while some are late; call it again when that may change.

    A member that has started its pair's collective stays there: a count never decreases.
    """
    size = len(members)
    if size < 2 * PAIR or size % PAIR:
        return
    came = {r for r, p in members.items() if p.spot.begun and p.spot.begun[0].count > step}
    late = {r for r, p in members.items() if r not in came and (not p.moves() or p.is_slow())}
    for rank, process in members.items():
        partner = rank ^ 1
        is_held = partner in late and rank not in late
        pairs = step if rank in late else step + 1
        columns = step if rank in late or is_held else step + 1
        begun = (
            CollectiveCount("pair", tuple(sorted((rank, partner))), pairs),
            CollectiveCount("column", tuple(range(rank % PAIR, size, PAIR)), columns),
        )
        process.spot = Spot(begun, is_held)
