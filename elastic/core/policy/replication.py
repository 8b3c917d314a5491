"""Which node holds the copy of a job's state, beside those that train it.

Rule: a copy lies where none of the job's members run, because those have the state anyway; and it
stays where it is for as long as that holds, because to move it is to send all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.policy.decision import Decision
from elastic.core.world import Generation, NodeId

NO_NODE = NodeId("")
Age = tuple[Generation, int]
"""Generation and steps: of two copies, the greater one is newer."""
NO_COPY: Age = (0, -1)


@dataclass(frozen=True)
class Place:
    """A node that may hold the copy.

    Attributes:
        host: its address: two agents under one address are likely to fail together.
        is_present: it is not lost.
        is_live: its stream stands.
        is_leaving: it drains.
        takes_copies: its agent can be reached by others for this.
        has_members: the job's group has members there.
        copy: of the job, that lies there.
        num_copies: of other jobs that it holds, or is to hold.
        refused_until_ns: it could not be reached, or had no room; not chosen before.
    """

    node_id: NodeId
    host: str = ""
    is_present: bool = True
    is_live: bool = True
    is_leaving: bool = False
    takes_copies: bool = True
    has_members: bool = False
    copy: Age = NO_COPY
    num_copies: int = 0
    refused_until_ns: int = 0


def is_fit(place: Place, now_ns: int) -> bool:
    """Decide whether the copy may stay on this node."""
    return (
        place.is_present
        and not place.is_leaving
        and place.takes_copies
        and not place.has_members
        and now_ns >= place.refused_until_ns
    )


def choose(places: Sequence[Place], now_ns: int) -> Decision[NodeId]:
    """Decide where the copy of a job that trains is to lie, if it cannot stay where it is.

    Args:
        places: all nodes.
        now_ns: the moment.

    Returns:
        The node; "" if there is none, with the reason.
    """
    fit = [place for place in places if place.is_live and is_fit(place, now_ns)]
    if fit:
        newest = max(place.copy for place in fit)
        hosts = {place.host for place in places if place.has_members}
        best = min(
            fit,
            key=lambda p: (p.copy < newest, p.host in hosts, p.num_copies, p.node_id),
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


def is_superfluous(copy: Age, holder: Age) -> bool:
    """Decide whether a copy may be freed where it is not wanted any more.

    Args:
        copy: that copy.
        holder: the copy on the node where it is wanted, `NO_COPY` before one has come there.
    """
    return NO_COPY < copy <= holder
