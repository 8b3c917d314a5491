"""Which node holds the copy of a job's state, in addition to the nodes that have it anyway.

Unsharded state needs one copy, on a node without members. Of a sharded model every node has its own
rows, whose copy is on any other node.

Rule: a copy is never on the node of its source, and it stays on its holder as long as that is true,
because to move it is to send all of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from elastic.core.policy.decision import Decision
from elastic.core.world import ALL_ALIKE, Generation, NodeId

NO_NODE = NodeId("")
Age = tuple[Generation, int]
"""Generation and steps: of two copies, the greater one is newer."""
NO_COPY: Age = (0, -1)
TRAINING_COUNTS = 4
"""Weight, in copies, of a node that trains the job itself, and may be lost with the source."""


KEPT_S = 120.0
"""How long a node keeps and serves the memory of workers that died there."""
UNREPORTED_S = 10.0
"""Time limit for an agent to get the destination of its rows, and for workers to copy them all."""


class CopyMode(IntEnum):
    """Whether a node's agent sends its snapshots to another node.

    UNKNOWN: it has no order yet. ON: it does. OFF: there is no holder, or it accepts none.
    """

    UNKNOWN = 0
    ON = 1
    OFF = 2


@dataclass(frozen=True)
class CopyProgress:
    """The progress of the newest snapshot of a node's rows to its holder.

    Attributes:
        bringing: as reported by the agent.
        is_whole: all workers of the node have copied their part.
        has_arrived: the other node has it.
        waited_s: since it was started.
    """

    bringing: CopyMode
    is_whole: bool
    has_arrived: bool
    waited_s: float


@dataclass(frozen=True)
class CopyCandidate:
    """A node that may hold the copy.

    Attributes:
        host: its address: two agents under one address are likely to fail together.
        zone: nodes of one zone fail together; "" if unknown.
        is_live: its stream is open.
        takes_copies: its agent can be reached by others for this.
        has_members: the job's group has members there.
        copy: age of that source's copy there.
        num_copies: other copies that it holds, or should hold.
        refused_until_ns: it could not be reached, or had no memory; not chosen before.
    """

    node_id: NodeId
    host: str = ""
    zone: str = ""
    is_present: bool = True
    is_live: bool = True
    is_leaving: bool = False
    takes_copies: bool = True
    has_members: bool = False
    copy: Age = NO_COPY
    num_copies: int = 0
    refused_until_ns: int = 0


def is_fit(place: CopyCandidate, now_ns: int, source: NodeId) -> bool:
    has_it = place.has_members if source == ALL_ALIKE else place.node_id == source
    return (
        place.is_present
        and not place.is_leaving
        and place.takes_copies
        and not has_it
        and now_ns >= place.refused_until_ns
    )


def choose(
    places: Sequence[CopyCandidate], now_ns: int, source: NodeId = ALL_ALIKE
) -> Decision[NodeId]:
    """Choose the holder of a training job's copy, if it cannot stay where it is.

    Args:
        places: all nodes that may be chosen, and those that train.
        now_ns: the moment.
        source: the node whose rows they are, `ALL_ALIKE` if all members have the same.

    Returns:
        The node; "" if there is none, with the reason.
    """
    fit = [place for place in places if place.is_live and is_fit(place, now_ns, source)]
    if fit:
        newest = max(place.copy for place in fit)
        is_whole = source == ALL_ALIKE
        having = [p for p in places if (p.has_members if is_whole else p.node_id == source)]
        hosts, zones = {p.host for p in having}, {p.zone for p in having}
        best = min(
            fit,
            key=lambda p: (
                p.copy < newest,
                not p.zone or p.zone in zones,
                p.host in hosts,
                p.num_copies + TRAINING_COUNTS * p.has_members,
                p.node_id <= source,  # Each to the next one, cyclic, so that none holds many.
                p.node_id,
            ),
        )
        why = f"it holds {best.num_copies} others" if best.copy == NO_COPY else "it has one"
        return Decision(best.node_id, why)
    refused = [p.refused_until_ns for p in places if p.refused_until_ns > now_ns]
    live = sum(place.is_live for place in places)
    training = sum(place.is_live and place.has_members for place in places)
    reason = (
        f"no node is there for it: {live} live, {training} of them train the job themselves, "
        f"{len(refused)} cannot be reached or have no room"
    )
    return Decision(NO_NODE, reason, min(refused, default=None))


def querying_rank(node_id: NodeId, first_ranks: Mapping[NodeId, int], world_size: int) -> int:
    """Return the rank of the member of a new group that queries a node for rows of a sharded model.

    One of the node itself, if there is one; else any. So no member gets more nodes than its share,
    and the result does not depend on what other nodes have: if a node is lost while the members are
    notified one after the other, no node is left out.
    """
    here = first_ranks.get(node_id)
    return zlib.crc32(node_id.encode()) % world_size if here is None else here


def is_superfluous(copy: Age, base: Age) -> bool:
    """Decide whether a copy may be dropped where it is not wanted any more.

    Args:
        copy: its age.
        base: the age of the oldest wanted copy, `NO_COPY` before all of them have arrived. Once
            they have, the run can continue from them, whatever is lost next.
    """
    return NO_COPY < copy <= base


def is_awaited(way: CopyProgress) -> Decision[bool]:
    """Decide whether the next snapshot of a sharded model has to wait for this one's arrival.

    There are two slots for snapshots, here and on the holders, and the next but one overwrites this
    one. If the next is started only when this one has arrived from all nodes, all rows of one of
    the two are in memory, whichever node dies. A group's first does not wait: the state that the
    group started from is in the other slot.
    """
    if way.has_arrived or way.bringing is CopyMode.OFF:
        return Decision(False, "it has arrived" if way.has_arrived else "no node takes it")
    if way.bringing is CopyMode.ON and way.is_whole:
        return Decision(True, "it is on its way to another node")
    is_early = way.waited_s < UNREPORTED_S
    return Decision(is_early, f"not sent for {way.waited_s:.0f} s, of {UNREPORTED_S:g}")


@dataclass(frozen=True)
class UncopiedState:
    """State of a job in the memory of a leaving node that does not train it any more.

    Attributes:
        is_releasing: the job is paused or preempted: it was saved, and waits for a user or a slot.
        trains: all members of its newest group train.
        has_place: another node accepts each copy, or may within some time.
        is_elsewhere: all state that the newest or the next group could continue from is on other
            nodes.
    """

    is_releasing: bool
    trains: bool
    has_place: bool
    is_elsewhere: bool


def is_left_behind(what: UncopiedState) -> Decision[bool]:
    """Decide whether a drained node has to stay for its copies, until its deadline.

    Without a training group, its copies may be the only ones, and the next group needs them. If
    there is no other holder, waiting is useless.
    """
    if what.is_releasing or what.is_elsewhere:
        return Decision(False, "it was saved" if what.is_releasing else "all of it lies elsewhere")
    if not what.trains:
        return Decision(True, "the next group may continue from it")
    return Decision(what.has_place, "it does not lie elsewhere yet")
