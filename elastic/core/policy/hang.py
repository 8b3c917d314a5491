"""Which members of a group are hung: the main thread stands still, and all others wait for it.

Rule: only what a member says of itself counts, and only while it goes on saying so. Whoever moves,
however slowly, is never a culprit; when nobody stands still, or somebody is silent, nobody is
accused. Silence is for probes, and a group in which all wait for `collective_timeout_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.config import NS_PER_S
from elastic.core.policy.decision import Decision
from elastic.core.world import Generation, WorkerId

FRESH_NS = 3 * NS_PER_S
"""What was not said again for so long is not believed; a worker repeats it every second."""


@dataclass(frozen=True)
class Sight:
    """What a member said of its main thread.

    Attributes:
        generation: in which group.
        said_ns: when it was heard.
        waiting_since_ns: since when it waits for its peers, None if it does not.
        still_since_ns: since when it has neither moved nor waited, None if it moves or waits.
        epoch, step: where it is.
    """

    generation: Generation
    said_ns: int
    waiting_since_ns: int | None = None
    still_since_ns: int | None = None
    epoch: int = 0
    step: int = 0

    def waits(self, generation: Generation, now_ns: int) -> bool:
        """Return whether it waits for its peers in this group now."""
        return self.waiting_since_ns is not None and self._holds(generation, now_ns)

    def stands(self, generation: Generation, now_ns: int) -> bool:
        """Return whether it stands still in this group now, and not because it waits."""
        return self.still_since_ns is not None and self._holds(generation, now_ns)

    def _holds(self, generation: Generation, now_ns: int) -> bool:
        return self.generation == generation and now_ns - self.said_ns <= FRESH_NS


@dataclass(frozen=True)
class Watched:
    """A member of the newest group.

    Attributes:
        trains: it is inside its train function in this generation, and nobody has told it to end.
        sight: what it said last, None for nothing.
    """

    worker_id: WorkerId
    trains: bool
    sight: Sight | None = None


@dataclass(frozen=True)
class Hang:
    """Members that hang, and since when the whole group has stood because of them."""

    culprits: tuple[WorkerId, ...] = ()
    since_ns: int = 0


def judge(
    generation: Generation, members: Sequence[Watched], now_ns: int, timeout_ns: int
) -> Decision[Hang]:
    """Decide who hangs.

    Time counts from the moment at which all others wait, and from the last movement of those who
    do not: a rank that computes alone for long, and then lets all others wait for a moment, has
    not hung for long.

    Args:
        generation: of the group.
        members: all of them.
        now_ns: monotonic.
        timeout_ns: of standing still; 0 accuses nobody.
    """
    waiting, standing = [], []
    for member in members:
        sight = member.sight
        if not member.trains or sight is None:
            return Decision(Hang(), f"{member.worker_id} says nothing of itself")
        if sight.waits(generation, now_ns):
            waiting.append(sight.waiting_since_ns or 0)
        elif sight.stands(generation, now_ns):
            standing.append((member.worker_id, sight.still_since_ns or 0))
        else:
            return Decision(Hang(), f"{member.worker_id} moves")
    if not waiting or not standing:
        return Decision(Hang(), "all wait" if waiting else "nobody waits")
    since_ns = max(*waiting, *(since for _, since in standing))
    names = tuple(worker_id for worker_id, _ in standing)
    if not timeout_ns or now_ns - since_ns < timeout_ns:
        return Decision(Hang(), f"waiting for {', '.join(names)}")
    return Decision(Hang(names, since_ns), f"{len(waiting)} members wait for {', '.join(names)}")
