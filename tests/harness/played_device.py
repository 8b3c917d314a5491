"""A device that works behind the host's back, played on CPU tensors.

As with CUDA and NCCL, whoever waits for a message returns at once, and whatever is done with a
tensor that the device still works on is put into its stream: the host goes on with tensors of the
right shape and no contents. When a group is aborted, messages that have not come end without an
error and leave partial sums behind, on which the stream then goes on. What needs a value on the
host (`.item()`, a copy), or draws random numbers, waits for the stream.

The device gets further only when the host looks at an event or waits for it. So a process that is
killed at a place in the stream has done what comes before, and nothing of what comes after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from elastic.worker.engine.context import current
from elastic.worker.group import accelerators
from elastic.worker.group.group_resources import GroupResources
from elastic.worker.group.member_links import MemberLinks, links_of
from elastic.worker.reduce import commit_gate
from elastic.worker.reduce.commit_gate import CommitGate
from elastic.worker.reduce.step_metadata import MetadataExchange
from elastic.worker.reduce.transports import bytes_of

POLL_S = 100e-6
FIRST_TAG = 1 << 50
Attempt = Callable[[], bool]
"""Does a piece of work, if it can be done now; returns whether it is."""


class PlayedEvent:
    """A place in the stream."""

    def __init__(self, device: PlayedDevice) -> None:
        """Be where all that was given so far is done."""
        self._device, self._number = device, device.given

    def query(self) -> bool:
        """Let the device get further, and return whether it has come here."""
        self._device.advance()
        return self._device.done >= self._number


class PlayedWork:
    """What waits in the device's stream alone."""

    def wait(self) -> None:
        """Return at once."""


class PlayedDevice(TorchDispatchMode):
    """The device of a process; entered once, on its main thread.

    Attributes:
        given, done: how many pieces of work it was given, and has done.
        aborted: messages of this generation's group and older ones come no more.
    """

    def __init__(self, at: Callable[[str], None]) -> None:
        """Have nothing to do.

        Args:
            at: called with the name of a place whenever the process comes there: "send" before
                messages are sent, "sent" after it, when others are to come, "arrived" when all
                have come and the host does not know it yet; "confirm" and "confirmed" before and
                after this member says to the others that its device has done the exchange.
        """
        super().__init__()
        self.at = at
        self.given = self.done = self.aborted = 0
        self._work: deque[Attempt] = deque()
        # Number of the last work that uses a storage, by its address. Work keeps what it uses, so
        # that an address is not another's before it is done.
        self._busy: dict[int, int] = {}
        self._counts: WeakKeyDictionary[MemberLinks, dict[Any, int]] = WeakKeyDictionary()

    # ------------------------------------------------------------------ what the engine asks

    def record(self, device: torch.device) -> PlayedEvent:
        """Return an event behind all that was given so far."""
        del device
        return PlayedEvent(self)

    def messages(self, group: Any) -> accelerators.BeginMessages:
        """Return what enqueues messages in a group."""
        links = links_of(group)
        counts = self._counts.setdefault(links, {})

        def begin(operations: Sequence[dist.P2POp]) -> list[PlayedWork]:
            context = current()
            batch = PlayedMessages(self, links, context.generation if context else 0)
            for one in operations:
                if one.tensor.numel():
                    count = counts[one.op, one.group_peer] = (
                        counts.get((one.op, one.group_peer), 0) + 1
                    )
                    batch.add(one, FIRST_TAG + count)
            self._give(batch.attempt, *(one.tensor for one in operations))
            return [PlayedWork()]

        return begin

    def register(self, device: torch.device, address: int, num_bytes: int) -> None:
        """Take all memory for registered: it copies at once."""

    def unregister(self, address: int) -> None:
        """Take all memory for registered."""

    # ------------------------------------------------------------------ the stream

    def _give(self, attempt: Attempt, *tensors: torch.Tensor) -> None:
        self.given += 1
        for one in tensors:
            self._busy[_address(one)] = self.given
        self._work.append(attempt)

    def advance(self) -> None:
        """Do what can be done without waiting."""
        # The host has counted a change of a tensor already, when it was asked for.
        with (
            torch.no_grad(),
            torch._C._AutoDispatchBelowADInplaceOrView(),
            _disable_current_modes(),
        ):
            while self._work and self._work[0]():
                self._work.popleft()
                self.done += 1
        if not self._work:
            self._busy.clear()

    def wait_for(self, *tensors: torch.Tensor) -> None:
        """Let the host wait until nothing changes these any more."""
        last = self._last(tensors)
        while self.done < last:
            self.advance()
            time.sleep(POLL_S)

    def _last(self, tensors: Sequence[torch.Tensor]) -> int:
        if not self._work:
            return 0
        return max((self._busy.get(_address(one), 0) for one in tensors), default=0)

    # ------------------------------------------------------------------ operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do an operation now, if nothing that it touches is being worked on, or enqueue it."""
        del types
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        schema = func._schema
        aliases = [one.alias_info for one in schema.returns]
        is_view = any(one is not None and not one.is_write for one in aliases)
        if is_view or self._last(tensors) <= self.done:
            return func(*args, **kwargs)
        written = [one for one in schema.arguments if one.alias_info and one.alias_info.is_write]
        waits = {
            torch.Tag.nondeterministic_seeded,
            torch.Tag.data_dependent_output,
            torch.Tag.dynamic_output_shape,
        }
        # Batch norm changes its statistics, and its schema does not say so.
        is_odd = not schema.name.startswith("aten::") or "batch_norm" in schema.name
        if is_odd or waits & set(func.tags) or (written and None in aliases):
            self.wait_for(*tensors)
            return func(*args, **kwargs)
        if written:
            self._give(_done(lambda: func(*args, **kwargs)), *tensors)
            named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            results = [named[one.name] for one in written]
            if not schema.returns:
                return None
            return results[0] if len(schema.returns) == 1 else tuple(results)
        made = func(*args, **kwargs)  # Of what is there by chance: for its shape.
        known = {_address(one) for one in tensors}
        leaves = tree_leaves(made)
        fresh = [one for one in leaves if isinstance(one, torch.Tensor)]
        if len(fresh) != len(leaves) or known & {_address(one) for one in fresh}:
            self.wait_for(*tensors)
            return func(*args, **kwargs)

        def fill() -> None:
            for into, one in zip(fresh, tree_leaves(func(*args, **kwargs)), strict=True):
                into.copy_(one)

        self._give(_done(fill), *tensors, *fresh)
        return made


class PlayedMessages:
    """Messages that are sent and received as one, over the connections of the group's members."""

    def __init__(self, device: PlayedDevice, links: MemberLinks, generation: int) -> None:
        """Have none."""
        self._device, self._mesh, self._generation = device, links.mesh, generation
        self._sends: list[tuple[int, int, torch.Tensor]] = []
        self._receives: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self._sent: list[torch.Tensor] | None = None
        self._missing = 0

    def add(self, operation: dist.P2POp, tag: int) -> None:
        """Send or receive one more."""
        tensor, peer = operation.tensor, operation.group_peer
        if operation.op is dist.isend:
            self._sends.append((peer, tag, tensor))
        else:
            self._receives.append((peer, tag, tensor, torch.zeros_like(tensor)))

    def attempt(self) -> bool:
        """Get further; once the group is aborted, end with what has come by then."""
        if self._generation <= self._device.aborted:
            for _, _, tensor, landed in self._receives:
                some = tensor.numel() // 2
                tensor[:some] = landed[:some]
            return True
        with suppress(RuntimeError):  # A peer is gone: what it has not sent never comes.
            if self._sent is None:
                self._send()
            self._mesh.poll()
        if self._missing or self._sent is None:
            return False
        for _, _, tensor, landed in self._receives:
            tensor.copy_(landed)
        self._device.at("arrived")
        return True

    def _send(self) -> None:
        self._device.at("send")
        self._sent, self._missing = [], len(self._receives)
        for rank, tag, _, landed in self._receives:
            self._mesh.expect(rank, tag, [bytes_of(landed)], self._arrived)
        for rank, tag, tensor in self._sends:
            self._sent.append(tensor.clone())
            self._mesh.send(rank, tag, [bytes_of(self._sent[-1])])
        self._device.at("sent")

    def _arrived(self) -> None:
        self._missing -= 1


def _done(call: Callable[[], Any]) -> Attempt:
    def attempt() -> bool:
        call()
        return True

    return attempt


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------------- in a worker's process

_devices: list[PlayedDevice] = []


def install(at: Callable[[str], None], *, opens_gate: bool = False) -> None:
    """Let this process believe that the CPU is a device; once for its life.

    Args:
        at: see `PlayedDevice`.
        opens_gate: commit steps without waiting for the device, to see that it is found out.
    """
    if _devices:
        _devices[0].at = at
        return
    device = PlayedDevice(at)
    _devices.append(device)
    accelerators.KINDS["cpu"] = device
    _copies_wait(device)
    _aborts_reach(device)
    _gate_obeys(device, is_open=opens_gate)
    device.__enter__()


def _copies_wait(device: PlayedDevice) -> None:
    """Let whoever reads a tensor's memory without an operation wait, as for a device's copy."""
    for name in ("cpu", "numpy", "tolist"):
        real = getattr(torch.Tensor, name)

        def waits(self: torch.Tensor, *args: Any, _real: Any = real, **named: Any) -> Any:
            device.wait_for(self)
            return _real(self, *args, **named)

        setattr(torch.Tensor, name, waits)


def _aborts_reach(device: PlayedDevice) -> None:
    """End messages where NCCL's are: when the group's end has been announced, by its thread."""
    real = GroupResources.abort_nccl

    def abort(self: GroupResources) -> None:
        device.aborted = max(device.aborted, self.spec.generation)
        real(self)

    GroupResources.abort_nccl = abort  # type: ignore[method-assign]


def _gate_obeys(device: PlayedDevice, *, is_open: bool) -> None:
    """Let orders strike where members confirm to each other."""

    class Confirmation(MetadataExchange):
        def start(self, values: Sequence[float]) -> None:
            device.at("confirm")
            super().start(values)
            device.at("confirmed")

    commit_gate.MetadataExchange = Confirmation  # type: ignore[misc]
    if is_open:
        CommitGate.attach = lambda self, group: None  # type: ignore[method-assign]
