"""Devices that work behind the host's back: a call returns before the device has done its work.

Whether a device is done with what it was given, an event says that was recorded behind it. A work
of NCCL's that was waited for has told only the device's stream to wait, and one whose communicator
is aborted ends without an error, with whatever had come by then.

Rule: whoever meets a device asks here, and nothing follows from a call that has returned. Tests
put a played device in CUDA's place, of whose tensors torch believes that they are the CPU's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastic.worker.group import c10d

POLL_S = 50e-6
"""Between two looks at an event; a step takes milliseconds."""
PORTABLE = 1
"""CUDA's flag for memory that is registered for all devices of a process."""

BeginMessages = Callable[[list[dist.P2POp]], Sequence[Any]]
"""Enqueues operations (`dist.P2POp`) as one, and returns works to be waited for."""


class DeviceEvent(Protocol):
    """A place in what a device was given."""

    def query(self) -> bool:
        """Return whether the device has come there; raises RuntimeError if it failed."""
        ...


class Accelerator(Protocol):
    """What is asked of a kind of device."""

    def record(self, device: torch.device) -> DeviceEvent:
        """Return an event behind all that was given to this device's current stream."""
        ...

    def messages(self, group: Any) -> BeginMessages | None:
        """Return what carries this device's tensors in a group, None if the host has to."""
        ...

    def register(self, device: torch.device, address: int, num_bytes: int) -> None:
        """Let devices copy to this memory of the host directly; raises OSError if refused."""
        ...

    def unregister(self, address: int) -> None:
        """Take that back, before the memory is unmapped; raises OSError if refused."""
        ...


class TorchAccelerator:
    """A device that torch drives; memory of the host is registered with CUDA alone."""

    def record(self, device: torch.device) -> DeviceEvent:
        """Return an event; see `Accelerator`."""
        module = torch.get_device_module(device)
        event: DeviceEvent = module.Event()
        event.record(module.current_stream(device))  # type: ignore[attr-defined]
        return event

    def messages(self, group: Any) -> BeginMessages | None:
        """Return NCCL's, where the group has it."""
        return dist.batch_isend_irecv if c10d.has_nccl(group) else None

    def register(self, device: torch.device, address: int, num_bytes: int) -> None:
        """Register memory; see `Accelerator`."""
        if device.type != "cuda":
            raise OSError(f"memory cannot be registered with a device of type {device.type}")
        with torch.cuda.device(device):  # Else a thread's first call is to device 0.
            code = _runtime().cudaHostRegister(address, num_bytes, PORTABLE)
        _check(code, f"cudaHostRegister of {num_bytes} bytes")

    def unregister(self, address: int) -> None:
        """Take that back."""
        _check(_runtime().cudaHostUnregister(address), "cudaHostUnregister")


def _runtime() -> Any:
    return torch.cuda.cudart()


def _check(code: Any, call: str) -> None:
    if int(code) != 0:
        raise OSError(f"{call}: CUDA error {int(code)}, {_runtime().cudaGetErrorString(code)}")


KINDS: dict[str, Accelerator | None] = {"cpu": None, "meta": None}
"""By type of device; all others are torch's. None does at once what it is told."""
_TORCHS = TorchAccelerator()


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return what drives a device, None if calls on its tensors return when they are done."""
    return KINDS.get(device.type, _TORCHS)


def record(devices: Iterable[torch.device]) -> list[DeviceEvent]:
    """Return events behind all that these devices were given so far; none for the CPU."""
    found = ((accelerator_of(device), device) for device in devices)
    return [one.record(device) for one, device in found if one is not None]


def wait_done(events: Iterable[DeviceEvent], look: Callable[[], None] = lambda: None) -> None:
    """Wait until devices have come to these events.

    Args:
        events: as `record` returns them.
        look: called while we wait; raises to give up, because the device may never come there.

    Raises:
        RuntimeError: a device failed.
    """
    for event in events:
        while not event.query():
            look()
            time.sleep(POLL_S)
