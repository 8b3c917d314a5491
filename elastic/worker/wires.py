"""Point-to-point messages of one exchange: posted at once, waited for later.

Rule: tensors that were posted belong to the wires until they were waited for, or the group is
gone. gloo carries CPU tensors in the background by itself, small ones go faster through a mesh (see
`mesh`); tensors of a device go by NCCL, or
through pinned memory where the group has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastic.worker import c10d
from elastic.worker.mesh import Mesh, mesh_of


@dataclass(frozen=True)
class Message:
    """A tensor to another rank, or from it.

    Attributes:
        is_sent: otherwise it is received.
        tensor: flat and contiguous.
        rank: of the other one.
        tag: keeps messages apart that are under way between the same two ranks.
    """

    is_sent: bool
    tensor: torch.Tensor
    rank: int
    tag: int


class Wires(Protocol):
    """What carries the messages of one exchange."""

    def post(self, messages: Sequence[Message]) -> None:
        """Begin to send and to receive; returns at once."""
        ...

    def wait_received(self) -> None:
        """Wait for what is received; raises RuntimeError if the group broke."""
        ...

    def wait_all(self) -> None:
        """Wait until nothing is under way; raises RuntimeError if the group broke."""
        ...


class NoWires:
    """A group of one."""

    def post(self, messages: Sequence[Message]) -> None:
        """There is nothing to send."""

    def wait_received(self) -> None:
        """There is nothing to wait for."""

    def wait_all(self) -> None:
        """There is nothing to wait for."""


class GlooWires:
    """CPU tensors, carried in the background by gloo's own thread."""

    def __init__(self, group: Any) -> None:
        """Use this process group."""
        self._group = group
        self._coming: list[Any] = []
        self._going: list[Any] = []

    def post(self, messages: Sequence[Message]) -> None:
        """Begin to send and to receive; returns at once."""
        for message in messages:
            if message.is_sent:
                work = self._group.send([message.tensor], message.rank, message.tag)
                self._going.append(work)
            else:
                work = self._group.recv([message.tensor], message.rank, message.tag)
                self._coming.append(work)

    def wait_received(self) -> None:
        """Wait for what is received; raises RuntimeError if the group broke."""
        c10d.wait_messages(self._coming)
        self._coming = []

    def wait_all(self) -> None:
        """Wait until nothing is under way; raises RuntimeError if the group broke."""
        c10d.wait_messages([*self._coming, *self._going])
        self._coming, self._going = [], []


class MeshWires:
    """CPU tensors, through the group's own direct connections."""

    def __init__(self, mesh: Mesh) -> None:
        """Use this mesh."""
        self._mesh = mesh
        self._coming: list[tuple[int, int]] = []

    def post(self, messages: Sequence[Message]) -> None:
        """Begin to send and to receive; returns at once."""
        for message in messages:
            data = message.tensor.view(torch.uint8).numpy().data
            if message.is_sent:
                self._mesh.send(message.rank, message.tag, data)
            else:
                self._mesh.expect(message.rank, message.tag, data)
                self._coming.append((message.rank, message.tag))

    def wait_received(self) -> None:
        """Wait for what is received; raises RuntimeError if the group broke."""
        for rank, tag in self._coming:
            self._mesh.wait(rank, tag)
        self._coming = []

    def wait_all(self) -> None:
        """Wait until nothing is under way; raises RuntimeError if the group broke."""
        self.wait_received()
        self._mesh.flush()


class StagedWires:
    """Tensors of a device over gloo, which knows none: through pinned memory, one way and back."""

    def __init__(self, group: Any) -> None:
        """Use this process group."""
        self._wires = GlooWires(group)
        self._memory: dict[tuple[bool, int, int], torch.Tensor] = {}
        self._waiting: list[Message] = []
        self._back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied = torch.cuda.Event()

    def post(self, messages: Sequence[Message]) -> None:
        """Begin to copy; what is sent leaves when somebody waits, because it must be there."""
        for message in messages:
            memory = self._memory_of(message)
            if message.is_sent:
                memory.copy_(message.tensor, non_blocking=True)
                self._waiting.append(Message(True, memory, message.rank, message.tag))
            else:
                self._wires.post([Message(False, memory, message.rank, message.tag)])
                self._back.append((message.tensor, memory))
        self._copied.record()

    def wait_received(self) -> None:
        """Wait for what is received; raises RuntimeError if the group broke."""
        self._send()
        self._wires.wait_received()
        for tensor, memory in self._back:
            tensor.copy_(memory, non_blocking=True)
        self._back = []

    def wait_all(self) -> None:
        """Wait until nothing is under way; raises RuntimeError if the group broke."""
        self.wait_received()
        self._wires.wait_all()

    def _send(self) -> None:
        if self._waiting:
            self._copied.synchronize()
            waiting, self._waiting = self._waiting, []
            self._wires.post(waiting)

    def _memory_of(self, message: Message) -> torch.Tensor:
        key = (message.is_sent, message.rank, message.tag)
        memory = self._memory.get(key)
        if memory is None or memory.numel() != message.tensor.numel():
            memory = torch.empty(message.tensor.shape, dtype=message.tensor.dtype, pin_memory=True)
            self._memory[key] = memory
        return memory


class NcclWires:
    """Tensors of a device over NCCL; waiting is the device's, in its stream."""

    def __init__(self, group: Any) -> None:
        """Use this process group."""
        self._group = group
        self._works: list[Any] = []

    def post(self, messages: Sequence[Message]) -> None:
        """Begin to send and to receive; returns at once."""
        operations = [
            dist.P2POp(
                dist.isend if message.is_sent else dist.irecv,
                message.tensor,
                group=self._group,
                group_peer=message.rank,
            )
            for message in messages
        ]
        if operations:
            self._works += dist.batch_isend_irecv(operations)

    def wait_received(self) -> None:
        """Let the stream wait for what is received."""
        self.wait_all()

    def wait_all(self) -> None:
        """Let the stream wait until nothing is under way."""
        for work in self._works:
            work.wait()
        self._works = []


def make_small_wires(group: Any) -> Wires:
    """Return what carries small CPU tensors.

    Args:
        group: the process group; None for a group of one.
    """
    if group is None:
        return NoWires()
    mesh = mesh_of(group)
    return GlooWires(group) if mesh is None else MeshWires(mesh)


def make_wires(group: Any, device: torch.device) -> Wires:
    """Return what carries tensors of this device.

    Args:
        group: the process group; None for a group of one.
        device: of the tensors.
    """
    if group is None:
        return NoWires()
    if device.type == "cpu":
        return GlooWires(group)
    return NcclWires(group) if c10d.has_nccl(group) else StagedWires(group)
