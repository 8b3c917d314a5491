"""Which node holds the copy of a job's state, in addition to the nodes that have it anyway.

Unsharded state needs one copy, on a node without members. Of a sharded model every node has its own
rows, whose copy is on any other node.

All nodes are on a ring, and a copy goes to one of the next nodes behind its source. So no node
holds many, whatever is preferred, and few nodes are compared in a large cluster.

Rule: a copy is never on the node of its source, and it stays on its holder as long as that is true,
because to move it is to send all of it.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import chain, islice
from typing import NamedTuple

from elastic.core.facts import Generation, NodeId
from elastic.core.policy.decision import Decision

NO_NODE = NodeId("")
Age = tuple[Generation, int]
"""Generation and steps: of two copies, the greater one is newer."""
NO_COPY: Age = (0, -1)
NEARBY = 16
"""How many nodes behind a source are candidates: a node holds the copies of no more sources."""
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


class CopyCandidate(NamedTuple):
    """A node that may hold a copy, or that is a source.

    Attributes:
        host: its address: two agents under one address are likely to fail together.
        zone: nodes of one zone fail together; "" if unknown.
        trains: the job's group has members there.
    """

    node_id: NodeId
    host: str = ""
    zone: str = ""
    trains: bool = False


def _place(node: CopyCandidate) -> tuple[int, NodeId]:
    """Return the place on the ring: by a hash, because nodes of one zone have similar names."""
    return zlib.crc32(node.node_id.encode()), node.node_id


def ring(nodes: Iterable[CopyCandidate]) -> list[CopyCandidate]:
    """Return nodes in their order on the ring."""
    return sorted(nodes, key=_place)


def choose(
    having: Sequence[CopyCandidate],
    nodes: Sequence[CopyCandidate],
    barred: Collection[NodeId],
    ages: Mapping[NodeId, Age],
    num_copies: Mapping[NodeId, int],
) -> Decision[NodeId]:
    """Choose the holder of a source's copy, if it cannot stay where it is.

    Args:
        having: the nodes that have that state anyway; the first one sends it.
        nodes: all that can hold copies, in the order of `ring`.
        barred: those that may not hold this one: they have the state anyway, or refused it.
        ages: age of the copies of this source that nodes hold now.
        num_copies: how many of the job's sources have their copy on a node, or should.

    Returns:
        The node; "" if there is none, with the reason.
    """
    at = bisect_right(nodes, _place(having[0]), key=_place)
    behind = (one for one in chain(nodes[at:], nodes[:at]) if one.node_id not in barred)
    near = [*islice(behind, NEARBY)]
    if not near:
        return Decision(NO_NODE, f"none of {len(nodes)} nodes may hold it")
    near += [one for one in nodes if one.node_id in ages and one.node_id not in barred]
    newest = max(ages.get(one.node_id, NO_COPY) for one in near)
    hosts, zones = {one.host for one in having}, {one.zone for one in having}
    best = min(  # Of equals the first one behind the source.
        near,
        key=lambda one: (
            ages.get(one.node_id, NO_COPY) < newest,
            not one.zone or one.zone in zones,
            one.host in hosts,
            num_copies.get(one.node_id, 0) + TRAINING_COUNTS * one.trains,
        ),
    )
    return Decision(best.node_id, "it is behind the source" if newest == NO_COPY else "it has one")


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


def is_awaited(mode: CopyMode, *, is_whole: bool, waited_s: float) -> Decision[bool]:
    """Decide whether the next snapshot of a sharded model has to wait for this one to arrive.

    There are two slots for snapshots, here and on the holders, and the next but one overwrites this
    one. If the next is started only when this one has arrived from all nodes, all rows of one of
    the two are in memory, whichever node dies. A group's first does not wait: the state that the
    group started from is in the other slot.

    Args:
        mode: as shown by the node's agent.
        is_whole: all workers of the node have copied their part.
        waited_s: since it was started.
    """
    if mode is CopyMode.OFF:
        return Decision(False, "no node takes it")
    if mode is CopyMode.ON and is_whole:
        return Decision(True, "it is on its way to another node")
    is_early = waited_s < UNREPORTED_S
    return Decision(is_early, f"not sent for {waited_s:.0f} s, of {UNREPORTED_S:g}")
