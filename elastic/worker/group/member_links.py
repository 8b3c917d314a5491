"""A member's links in one group: connections, and memory shared within a node.

Each group has its links once its members have met in its store: connections to the partners of this
rank, and the memory of other ranks of the node that can be read in place.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from elastic.core.policy.exchange_plan import (
    GroupShape,
    flat_shape,
    partners,
    rows_plan,
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
GATHERED = 4
"""Tag of `gather`."""


@dataclass(frozen=True)
class MemberEntry:
    """How the other members reach this one.

    Attributes:
        node: a text that is equal exactly for members of the same node.
        pid, number, inode: of its process, and descriptor and inode of an empty memory file in it.
            A process that can open that file can read the member's memory.
    """

    endpoint: PeerEndpoint
    node: str
    pid: int
    number: int
    inode: int

    def to_bytes(self) -> bytes:
        endpoint = self.endpoint.plain()
        return json.dumps([endpoint, self.node, self.pid, self.number, self.inode]).encode()

    @staticmethod
    def of(text: bytes) -> MemberEntry:
        endpoint, *rest = json.loads(text)
        return MemberEntry(PeerEndpoint.of(endpoint), *rest)

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
            GroupBroken: this machine does not have the address, or no port to listen on.
        """
        self.rank, self.world_size = rank, world_size
        self._reach = reach
        self.sockets = _listening(rank, reach)
        probe = os.memfd_create("elastic-links", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, probe).atexit = False
        self.entry = MemberEntry(
            self.sockets.endpoint,
            _name_of_node(reach.node),
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
        self._connect(self.sockets, [entry.endpoint for entry in entries], wanted)
        here = [
            entry for entry, node in zip(entries, nodes, strict=True) if node == nodes[self.rank]
        ]
        return all(entry.is_readable() for entry in here)

    def _connect(
        self, sockets: PeerSockets, endpoints: Sequence[PeerEndpoint], to: Collection[int] | None
    ) -> None:
        try:
            sockets.join(self.rank, endpoints, partners=to)
        except OSError as error:
            raise GroupBroken(
                f"peer sockets: rank {self.rank} at {sockets.endpoint.address} could not "
                f"connect to all others ({error}): Connection closed; members must reach each "
                f"other at the addresses that their agents announce (--host)"
            ) from error

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

    def gather(self, mine: bytes) -> tuple[bytes, ...]:
        """Return what each member gives, by rank; all members call it.

        Raises:
            GroupBroken: the group broke.
        """
        found = {self.rank: mine}
        for one in rows_plan(self.rank, self.small_shape):
            parts = [found[rank] for rank in range(*one.held)]
            lengths = struct.pack(f"<{len(parts)}q", *map(len, parts))
            for other in one.sends:
                self.sockets.send(other, GATHERED, [memoryview(part) for part in (lengths, *parts)])
            for source, ranks in one.receives:
                message = memoryview(self.sockets.receive(source, GATHERED))
                sizes = struct.Struct(f"<{ranks[1] - ranks[0]}q")
                start = sizes.size
                for rank, size in zip(range(*ranks), sizes.unpack_from(message), strict=True):
                    found[rank] = bytes(message[start : start + size])
                    start += size
        self.sockets.flush()
        return tuple(found[rank] for rank in range(self.world_size))

    @contextmanager
    def sockets_to(self, ranks: Collection[int]) -> Iterator[PeerSockets]:
        """Yield connections to these ranks; all members call it, at the same time.

        In a small group all are connected. In a large one, in which each rank has few partners,
        they are made for this.

        Args:
            ranks: those that give our rank in turn.

        Raises:
            GroupBroken: the group broke, or a member cannot be reached.
        """
        if self.world_size <= FEW:
            yield self.sockets
            return
        sockets = _listening(self.rank, self._reach)
        try:
            texts = self.gather(json.dumps(sockets.endpoint.plain()).encode())
            endpoints = [PeerEndpoint.of(json.loads(text)) for text in texts]
            self._connect(sockets, endpoints, ranks)
            yield sockets
        finally:
            sockets.close()

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


def _name_of_node(node: str) -> str:
    """Return a name for a node of this machine that no node of another machine has."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        machine = secrets.token_hex()  # So no memory is shared.
    return f"{machine.strip()}/{node}"


def _listening(rank: int, reach: PeerAddress) -> PeerSockets:
    try:
        return PeerSockets(reach)
    except OSError as error:
        raise GroupBroken(
            f"peer sockets: Connection closed: rank {rank} cannot listen on {reach.host} "
            f"({error}); {remedy(error)}"
        ) from error


# ----------------------------------------------------------------------------- links of groups

_links: WeakKeyDictionary[Any, MemberLinks] = WeakKeyDictionary()


def links_of(group: Any) -> MemberLinks:
    """Return the links of a group whose members have connected.

    Raises:
        InvariantViolation: they have not.
    """
    links = _links.get(group)
    if links is None:
        raise InvariantViolation("the members of this group have not connected to each other yet")
    return links


def connect(group: Any, store: Any, reach: PeerAddress) -> None:
    """Meet the other members in the group's store and connect, unless that is done; all call it.

    Raises:
        RuntimeError: the group broke, or a member cannot be reached.
    """
    if group.size() == 1 or group in _links:
        return
    links = MemberLinks(group.rank(), group.size(), reach)
    keys = [f"links/{rank}" for rank in range(links.world_size)]
    store.set(keys[links.rank], links.entry.to_bytes())
    if links.rank == 0:
        # If each of a thousand members read a thousand values, the store would need 1.5 s for it.
        store.set("links", b"\n".join(bytes(text) for text in store.multi_get(keys)))
    can_read = links.join([MemberEntry.of(text) for text in bytes(store.get("links")).split(b"\n")])
    if all(one == b"1" for one in links.gather(b"1" if can_read else b"0")):
        links.share()
    # All have read them. torchrun keeps one store over all its attempts.
    store.delete_key(keys[links.rank])
    if links.rank == 0:
        store.delete_key("links")
    _links[group] = links


def share_bytes(group: Any, mine: bytes) -> tuple[bytes, ...]:
    """Return what each member of a connected group gives, by rank; all members call it.

    Raises:
        GroupBroken: the group broke.
    """
    return links_of(group).gather(mine) if group.size() > 1 else (mine,)
