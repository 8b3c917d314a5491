"""What carries the messages of an exchange: our own connections, or a group of torch's.

Rule: what is sent or received belongs to the transport until `wait_until` and `flush` have
returned, or the group is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from elastic.worker.group.accelerators import BeginMessages, accelerator_of
from elastic.worker.group.member_links import MemberLinks, links_of

Message = tuple[int, int, Sequence[torch.Tensor]]
"""Rank of the other one, tag, and flat tensors, one after the other."""


class Transport(Protocol):
    """Point-to-point messages, and the waits for them: what a `TreeExchange` sends its sums by.

    Another one is a class with these methods and a line in `transport_of`, which alone chooses:
    tags, plans and shared memory are the exchange's.

    Each bucket has one of its own, of one group; only the main thread calls it. What it shares with
    those of other buckets, it keeps by the group. All members make theirs in the same order, and
    send nothing meanwhile.

    Messages: each step has the same ones, with the same ranks, tags and sizes, to the same memory;
    from which memory may change. One may come before `expect`, and is kept for it. When `then` is
    called, and when `wait_until` returns, what came can be read: on a CPU by the host, on a device
    by what its current stream gets next.

    Connections: members have met before, and may use those of `MemberLinks`. Others are opened
    where those are (`MemberLinks.join`), by addresses that each member sends with its
    `MemberEntry`, and registered with `worker.group.connections`, which says what they owe. No
    setting selects a transport: it follows from the group's backend and the tensors' device. What
    only some members have is agreed on where they connect, as shared memory is
    (`member_links.connect`, by `MemberLinks.gather`).

    Errors: where a member is gone, its methods raise `GroupBroken`, or what torch's own collectives
    raise; any other exception counts as the user's error and fails the job.

    Aborts: a wait ends so, too, once another thread aborts the group: torch's are aborted by
    `ProcessGroups`, registered connections are cut.

    It carries sums of gradients and of modules' buffers, and small int64 tensors on the CPU that
    say where sums lie, which it holds until they are sent. A wait reads from all members, lest two
    that send wait for each other. The rows of a step go over `MemberLinks`, unless `carries_rows`
    and the bucket is small, and so does the state for members that lack it. Over torch's groups go
    the gradients of sharded models, and whatever the script sends.

    Attributes:
        has_tags: tags match messages; otherwise their order does, so that all ranks must begin
            exchanges in the same order.
        carries_rows: a message may begin with a tensor of float64 on the CPU, whatever the bucket's
            type and device are.
        has_all_reduce: torch sums such tensors faster, in an order of its own. It does so with
            consistency="samples", and nothing of these buckets is sent here.
    """

    has_tags: bool
    carries_rows: bool
    has_all_reduce: bool

    def expect(self, receives: Sequence[Message], then: Callable[[], None]) -> None:
        """Set where messages go; from then on there is room for them.

        Args:
            receives: of one round.
            then: called for each of them that is there.
        """
        ...

    def forget(self, receives: Sequence[Message]) -> None:
        """Expect these no more: there is no further step with them."""
        ...

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], then: Callable[[], None]
    ) -> None:
        """Begin the round whose receives these are; returns at once."""
        ...

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call this, but not from within."""
        ...

    def progress(self) -> None:
        """Get further without waiting for anybody."""
        ...

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Get further until something is there; raises GroupBroken if a member is gone."""
        ...

    def flush(self) -> None:
        """Wait until nothing of ours is on its way; raises GroupBroken if a member is gone."""
        ...


class SocketTransport:
    """CPU tensors over the group's own connections."""

    has_tags = True
    carries_rows = True
    has_all_reduce = False

    def __init__(self, links: MemberLinks) -> None:
        sockets = self._sockets = links.sockets
        self.call_soon = sockets.call_soon
        self.progress = sockets.poll
        self.wait_until = sockets.wait_until
        self.flush = sockets.flush
        self._views: dict[tuple[int, int], list[memoryview]] = {}

    def expect(self, receives: Sequence[Message], then: Callable[[], None]) -> None:
        for rank, tag, tensors in receives:
            views = self._views.get((rank, tag))
            if views is None:
                views = self._views[rank, tag] = [bytes_of(tensor) for tensor in tensors]
            self._sockets.expect(rank, tag, views, then)

    def forget(self, receives: Sequence[Message]) -> None:
        for rank, tag, _ in receives:
            self._sockets.forget(rank, tag)

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], then: Callable[[], None]
    ) -> None:
        """Send; what is received is expected since long ago."""
        del receives, then
        for rank, tag, tensors in sends:
            self._sockets.send(rank, tag, [bytes_of(tensor) for tensor in tensors])


class GroupTransport:
    """Tensors of a device over torch's group, by NCCL; waiting is the device's, in its stream.

    Rounds of exchanges that are under way take turns, in the order in which they began: so all
    ranks issue what they have in common in the same order.
    """

    has_tags = False
    carries_rows = False
    has_all_reduce = True

    def __init__(self, group: Any, begin: BeginMessages = dist.batch_isend_irecv) -> None:
        self._group, self._begin = group, begin
        self._due = _due_of.setdefault(group, deque())

    def expect(self, receives: Sequence[Message], then: Callable[[], None]) -> None:
        """Do nothing yet: NCCL receives when it sends."""

    def forget(self, receives: Sequence[Message]) -> None:
        """Do nothing: NCCL expects nothing ahead."""

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], then: Callable[[], None]
    ) -> None:
        """Enqueue a round; it is waited for when its turn comes."""
        operations = [
            dist.P2POp(kind, tensor, group=self._group, group_peer=rank)
            for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
            for rank, _, tensors in messages
            for tensor in tensors
        ]
        works = self._begin(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()
            for _ in receives:
                then()

        self._due.append(wait)

    def call_soon(self, call: Callable[[], None]) -> None:
        self._due.append(call)

    def progress(self) -> None:
        """Leave all to the device until a caller waits, lest its stream does."""

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Do round after round; see `Transport`."""
        while not is_there():
            self._due.popleft()()

    def flush(self) -> None:
        """Do nothing more: the ranks waited for have been sent to as well."""


def transport_of(group: Any, device: torch.device) -> Transport | None:
    """Return what carries tensors of this device between the members of a group.

    None if nothing does: their exchange copies them to memory of the host, and that has one.
    """
    accelerator = accelerator_of(device)
    if accelerator is None:
        return SocketTransport(links_of(group))
    begin = accelerator.messages(group)
    return GroupTransport(group, begin) if begin is not None else None


_due_of: WeakKeyDictionary[Any, deque[Callable[[], None]]] = WeakKeyDictionary()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a flat tensor, not a copy."""
    return tensor.view(torch.uint8).numpy().data
