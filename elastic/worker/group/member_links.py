"""A member's links in one group: connections, and memory shared within a node.

Each group has its links once its members have met: connections to the partners of this rank, and
the memory of other ranks of the node that can be read in place.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from elastic.core.policy.exchange_plan import (
    GroupShape,
    flat_shape,
    partners,
    shape_of,
    tree_plan,
)
from elastic.errors import GroupBroken, InvariantViolation
from elastic.runtime.worker_ports import remedy
from elastic.worker.group.peer_sockets import PeerAddress, PeerEndpoint, PeerSockets
from elastic.worker.group.shared_memory import PeerMemory

FEW = 16
"""Up to so many ranks small messages go from all to all: the time of one message, not log W."""
FINE = 1 << 60
"""An alignment so large that a bucket is never split."""
TAGS = 1 << 20
"""First tag of buckets."""
TAGS_OF_ONE = 128
"""Tags reserved for one exchange: two for each depth of a plan."""


@dataclass(frozen=True)
class MemberEntry:
    """How the other members reach this one.

    Attributes:
        node: a number that is equal exactly for members of the same node.
        pid, number, inode: of its process, and descriptor and inode of an empty memory file in it.
            A process that can open that file can read the member's memory.
    """

    endpoint: PeerEndpoint = field(default_factory=PeerEndpoint)
    node: int = 0
    pid: int = 0
    number: int = 0
    inode: int = 0

    def numbers(self) -> list[int]:
        """Return it as 64-bit integers, for an all-gather."""
        return [*self.endpoint.numbers(), self.node, self.pid, self.number, self.inode]

    @staticmethod
    def of(numbers: Sequence[int]) -> MemberEntry:
        *endpoint, node, pid, number, inode = numbers
        return MemberEntry(PeerEndpoint.of(endpoint), node, pid, number, inode)

    def is_readable(self) -> bool:
        """Return whether this process may open the member's memory files."""
        with suppress(OSError):
            return os.stat(f"/proc/{self.pid}/fd/{self.number}").st_ino == self.inode
        return False


class MemberLinks:
    """This rank's links in one group.

    Attributes:
        shape: how exchanges of large data connect the ranks; of small data `small_shape`.
        memory: by rank, of those whose memory we read in place; empty if any of the node cannot.
    """

    def __init__(self, rank: int, world_size: int, reach: PeerAddress) -> None:
        """Open the listener; `join` makes the connections.

        Raises:
            OSError: this machine does not have the address.
        """
        self.rank, self.world_size = rank, world_size
        self.sockets = PeerSockets(reach)
        probe = os.memfd_create("elastic-links", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, probe).atexit = False
        self.entry = MemberEntry(
            self.sockets.endpoint,
            _node_number(reach.node),
            os.getpid(),
            probe,
            os.fstat(probe).st_ino,
        )
        self.shape = self.small_shape = flat_shape(world_size)
        self.memory: dict[int, PeerMemory] = {}
        self._entries: Sequence[MemberEntry] = ()
        self._made = 0

    def join(self, entries: Sequence[MemberEntry]) -> bool:
        """Connect to our partners.

        Returns:
            Whether we can read the memory of all others of our node; `share` if all members can.

        Raises:
            GroupBroken: a member could not be reached.
        """
        self._entries = entries
        nodes = [0]
        for before, entry in pairwise(entries):
            nodes.append(nodes[-1] + (entry.node != before.node))
        self.shape = shape_of(nodes)
        if self.world_size > FEW:
            self.small_shape = self.shape
        wanted = None if self.world_size <= FEW else partners_of(self.rank, self.shape)
        try:
            self.sockets.join(self.rank, [entry.endpoint for entry in entries], partners=wanted)
        except OSError as error:
            raise GroupBroken(
                f"peer sockets: rank {self.rank} at {self.entry.endpoint.address} could not "
                f"connect to all others ({error}): Connection closed; members must reach each "
                f"other at the addresses that their agents announce (--host)"
            ) from error
        here = [
            entry for entry, node in zip(entries, nodes, strict=True) if node == nodes[self.rank]
        ]
        return all(entry.is_readable() for entry in here)

    def share(self) -> None:
        """Read the memory of the node's other ranks from now on: all members can."""
        first, last = next(
            (one.ranks for one in _local_groups(self.shape) if self.rank in range(*one.ranks)),
            (self.rank, self.rank + 1),
        )
        self.memory = {
            rank: PeerMemory(self._entries[rank].pid)
            for rank in range(first, last)
            if rank != self.rank
        }

    def next_tag(self) -> int:
        """Return the first of `TAGS_OF_ONE` tags that no other exchange of this group has.

        All ranks make the same exchanges in the same order, because they take the same steps.
        """
        self._made += 1
        return TAGS + TAGS_OF_ONE * self._made


def partners_of(rank: int, shape: GroupShape) -> frozenset[int]:
    """Return all ranks that a rank communicates with in any exchange; rows take the same edges."""
    return partners(tree_plan(rank, shape.world_size, shape, FINE, 1))


def _local_groups(shape: GroupShape) -> list[GroupShape]:
    if shape.is_local:
        return [shape]
    return [found for one in shape.groups for found in _local_groups(one)]


def _node_number(node: str) -> int:
    """Return a 63-bit number for a node's name on this machine."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return os.getpid()  # Unique, so no memory is shared.
    digest = hashlib.blake2b(f"{machine}/{node}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# ----------------------------------------------------------------------------- links of groups

_links: WeakKeyDictionary[Any, MemberLinks] = WeakKeyDictionary()
_open: WeakKeyDictionary[Any, MemberLinks] = WeakKeyDictionary()


def links_of(group: Any) -> MemberLinks:
    """Return the links of a group whose members have connected.

    Raises:
        InvariantViolation: they have not.
    """
    links = _links.get(group)
    if links is None:
        raise InvariantViolation("the members of this group have not connected to each other yet")
    return links


def open_links(group: Any, reach: PeerAddress) -> MemberLinks:
    """Return our links in this group; their `entry` must be sent to all members before `join`.

    Raises:
        GroupBroken: this machine does not have the address, or no port to listen on.
    """
    known = _links.get(group) or _open.get(group)
    if known is None:
        try:
            known = _open[group] = MemberLinks(group.rank(), group.size(), reach)
        except OSError as error:
            raise GroupBroken(
                f"peer sockets: Connection closed: rank {group.rank()} cannot listen on "
                f"{reach.host} ({error}); {remedy(error)}"
            ) from error
    return known


def join_links(group: Any, entries: Sequence[MemberEntry]) -> None:
    """Connect to our partners in this group, unless that is done; all members do so.

    Raises:
        GroupBroken: the group broke, or a member cannot be reached.
    """
    if group in _links:
        return
    links = _open[group]
    shares = links.join(entries)
    answers = [torch.zeros(1) for _ in entries]
    dist.all_gather(answers, torch.tensor([float(shares)]), group=group)
    if all(bool(one) for one in answers):
        links.share()
    del _open[group]
    _links[group] = links


def connect(group: Any, reach: PeerAddress) -> None:
    """Exchange entries and connect, unless that is done; all members must call it.

    Members that train over `train.epochs()` have connected before; those of plain loops may
    not. GroupBroken if the group broke, or a member cannot be reached.
    """
    if group.size() == 1 or group in _links:
        return
    mine = torch.tensor(open_links(group, reach).entry.numbers(), dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    join_links(group, [MemberEntry.of(one.tolist()) for one in rows])
