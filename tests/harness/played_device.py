"""A simulated asynchronous device, on CPU tensors.

As with CUDA and NCCL, waiting for a message returns at once, and each operation on a tensor with
pending work is enqueued on the device's stream: the host continues with tensors of the right shape
and undefined contents. When a group is aborted, pending messages end without an error and leave
partial sums, with which the stream continues. Operations that need a value on the host (`.item()`,
a copy), or draw random numbers, wait for the stream.

The device makes progress only when the host queries an event or waits. So a process that is killed
at a place in the stream has done all work before it, and none after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from elastic.worker.engine.train_call import current
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
"""Does a piece of work, if possible now; returns whether it is done."""


class PlayedEvent:
    """A place in the stream."""

    def __init__(self, device: PlayedDevice) -> None:
        """Record the place after all work that is enqueued so far."""
        self._device, self._number = device, device.given

    def query(self) -> bool:
        """Advance the device; return whether it has reached this place."""
        self._device.advance()
        return self._device.done >= self._number


class PlayedWork:
    """The handle of a message; only the stream waits for it, not the host."""

    def wait(self) -> None:
        """Return at once."""


class PlayedDevice(TorchDispatchMode):
    """The device of a process; entered once, on its main thread.

    Attributes:
        given, done: number of pieces of work that were enqueued, and that are done.
        aborted: messages of this and older generations are aborted.
    """

    def __init__(self, at: Callable[[str], None]) -> None:
        """Create a device with an empty stream.

        Args:
            at: called with the name of each place that the process reaches: "send" before
                messages are sent; "sent" after it, with messages still to be received; "arrived"
                when all were received but the host has not seen it yet; "confirm" and "confirmed"
                before and after this member confirms the device's exchange to the others.
        """
        super().__init__()
        self.at = at
        self.given = self.done = self.aborted = 0
        self._work: deque[Attempt] = deque()
        # Storage address -> number of the last work that uses it. Work keeps its tensors alive, so
        # that no address is reused before it is done.
        self._busy: dict[int, int] = {}
        self._counts: WeakKeyDictionary[MemberLinks, dict[Any, int]] = WeakKeyDictionary()

    # ------------------------------------------------------------------ interface for engine

    def record(self, device: torch.device) -> PlayedEvent:
        """Return an event after all work that is enqueued so far."""
        del device
        return PlayedEvent(self)

    def beside(self, device: torch.device) -> AbstractContextManager[object]:
        """Do all work that is enqueued; other threads then find the tensors as they are."""
        del device
        while self.done < self.given:
            self.advance()
            time.sleep(POLL_S)
        return nullcontext()

    def messages(self, group: Any) -> accelerators.BeginMessages:
        """Return the function that enqueues messages in a group."""
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
        """Do nothing: all memory counts as registered, since copies are synchronous."""

    def unregister(self, address: int) -> None:
        """Do nothing, as `register`."""

    # ------------------------------------------------------------------ the stream

    def _give(self, attempt: Attempt, *tensors: torch.Tensor) -> None:
        self.given += 1
        for one in tensors:
            self._busy[_address(one)] = self.given
        self._work.append(attempt)

    def advance(self) -> None:
        """Do all work that is possible without waiting."""
        # Tensor versions were already incremented on the host, when the work was enqueued.
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
        """Block the host until no pending work uses these tensors."""
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
        """Run an operation now if its tensors have no pending work; otherwise enqueue it."""
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
        # Batch norm writes its statistics, which its schema does not declare.
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
        made = func(*args, **kwargs)  # On undefined contents, only for its shape.
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
    """A batch of messages, sent and received over the connections of the group's members."""

    def __init__(self, device: PlayedDevice, links: MemberLinks, generation: int) -> None:
        """Create an empty batch."""
        self._device, self._sockets, self._generation = device, links.sockets, generation
        self._sends: list[tuple[int, int, torch.Tensor]] = []
        self._receives: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self._sent: list[torch.Tensor] | None = None
        self._missing = 0

    def add(self, operation: dist.P2POp, tag: int) -> None:
        """Add one send or receive."""
        tensor, peer = operation.tensor, operation.group_peer
        if operation.op is dist.isend:
            self._sends.append((peer, tag, tensor))
        else:
            self._receives.append((peer, tag, tensor, torch.zeros_like(tensor)))

    def attempt(self) -> bool:
        """Make progress; once the group is aborted, end with what was received by then."""
        if self._generation <= self._device.aborted:
            for _, _, tensor, landed in self._receives:
                some = tensor.numel() // 2
                tensor[:some] = landed[:some]
            return True
        with suppress(RuntimeError):  # A peer is gone: its unsent messages never arrive.
            if self._sent is None:
                self._send()
            self._sockets.poll()
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
            self._sockets.expect(rank, tag, [bytes_of(landed)], self._arrived)
        for rank, tag, tensor in self._sends:
            self._sent.append(tensor.clone())
            self._sockets.send(rank, tag, [bytes_of(self._sent[-1])])
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
    """Make this process use the CPU as an asynchronous device; call it once per process.

    Args:
        at: see `PlayedDevice`.
        opens_gate: commit steps without waiting for the device, to test that this is detected.
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
    """Make reads of a tensor's memory without an operation wait, as a copy from a device does."""
    for name in ("cpu", "numpy", "tolist"):
        real = getattr(torch.Tensor, name)

        def waits(self: torch.Tensor, *args: Any, _real: Any = real, **named: Any) -> Any:
            device.wait_for(self)
            return _real(self, *args, **named)

        setattr(torch.Tensor, name, waits)


def _aborts_reach(device: PlayedDevice) -> None:
    """End messages where NCCL's end: in the aborting thread, after the end was announced."""
    real = GroupResources.abort_nccl

    def abort(self: GroupResources) -> None:
        device.aborted = max(device.aborted, self.spec.generation)
        real(self)

    GroupResources.abort_nccl = abort  # type: ignore[method-assign]


def _gate_obeys(device: PlayedDevice, *, is_open: bool) -> None:
    """Call `at` where members confirm to each other."""

    class Confirmation(MetadataExchange):
        def start(self, values: Sequence[float]) -> None:
            device.at("confirm")
            super().start(values)
            device.at("confirmed")

    commit_gate.MetadataExchange = Confirmation  # type: ignore[misc]
    if is_open:
        CommitGate.attach = lambda self, group: None  # type: ignore[method-assign]
