"""Devices that work behind the host's back: a call returns before the device has done its work.

An event that was recorded after some work shows whether the device has finished that work.
`Work.wait()` of NCCL only makes the device's stream wait, and an operation whose communicator is
aborted ends without an error, with whatever had arrived by then.

Rule: code that depends on a device's result waits for an event from here; that a call has returned
proves nothing. Tests replace CUDA by a played device, whose tensors are CPU tensors to torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastic.worker.group import c10d

POLL_S = 50e-6
"""Between two polls of an event; a step takes milliseconds."""
PORTABLE = 1
"""CUDA's flag for memory that is registered for all devices of a process."""

BeginMessages = Callable[[list[dist.P2POp]], Sequence[Any]]
"""Enqueues operations (`dist.P2POp`) as one, and returns works to be waited for."""


class DeviceEvent(Protocol):
    """A position in a device's queue of work."""

    def query(self) -> bool:
        """Return whether the device has reached it; raises RuntimeError if it failed."""
        ...


class Accelerator(Protocol):
    """What the engine needs of a kind of device."""

    def record(self, device: torch.device) -> DeviceEvent:
        """Return an event after all work on this device's current stream."""
        ...

    def beside(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context whose work follows all that is queued now, and delays nothing later.

        Another thread may enter it. One at a time for each device.
        """
        ...

    def messages(self, group: Any) -> BeginMessages | None:
        """Return the sender of this device's tensors in a group, None to send host copies."""
        ...

    def register(self, device: torch.device, address: int, num_bytes: int) -> None:
        """Let devices copy to this memory of the host directly; raises OSError if refused."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` before the memory is unmapped; raises OSError if refused."""
        ...


class TorchAccelerator:
    """A device of torch; host memory can be registered with CUDA only."""

    def __init__(self) -> None:
        # One for each device: torch keeps freed memory for the stream that it was allocated on.
        self._side_streams: dict[torch.device, torch.Stream] = {}

    def record(self, device: torch.device) -> DeviceEvent:
        module = torch.get_device_module(device)
        event: DeviceEvent = module.Event()
        event.record(module.current_stream(device))  # type: ignore[attr-defined]
        return event

    def beside(self, device: torch.device) -> AbstractContextManager[object]:
        module: Any = torch.get_device_module(device)
        stream = self._side_streams.get(device)
        if stream is None:
            stream = self._side_streams[device] = module.Stream(device)
        stream.wait_stream(module.current_stream(device))
        return _stream_of(module, device, stream)

    def messages(self, group: Any) -> BeginMessages | None:
        """Return NCCL's sender, where the group has NCCL."""
        return dist.batch_isend_irecv if c10d.has_nccl(group) else None

    def register(self, device: torch.device, address: int, num_bytes: int) -> None:
        if device.type != "cuda":
            raise OSError(f"memory cannot be registered with a device of type {device.type}")
        with torch.cuda.device(device):  # Else a thread's first call is to device 0.
            code = _runtime().cudaHostRegister(address, num_bytes, PORTABLE)
        _check(code, f"cudaHostRegister of {num_bytes} bytes")

    def unregister(self, address: int) -> None:
        _check(_runtime().cudaHostUnregister(address), "cudaHostUnregister")


@contextmanager
def _stream_of(module: Any, device: torch.device, stream: torch.Stream) -> Iterator[None]:
    # A thread's first device is 0: on leaving the stream it would use memory there.
    with module.device(device), module.stream(stream):
        yield


def _runtime() -> Any:
    return torch.cuda.cudart()


def _check(code: Any, call: str) -> None:
    if int(code) != 0:
        raise OSError(f"{call}: CUDA error {int(code)}, {_runtime().cudaGetErrorString(code)}")


KINDS: dict[str, Accelerator | None] = {"cpu": None, "meta": None}
"""By type of device; others are `TorchAccelerator`. None: calls return when they are done."""
_TORCHS = TorchAccelerator()


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return a device's accelerator, None if calls on its tensors return when they are done."""
    return KINDS.get(device.type, _TORCHS)


def _asynchronous(
    devices: Iterable[torch.device],
) -> Iterator[tuple[Accelerator, torch.device]]:
    for device in devices:
        accelerator = accelerator_of(device)
        if accelerator is not None:
            yield accelerator, device


def record(devices: Iterable[torch.device]) -> list[DeviceEvent]:
    """Return events after all work queued on these devices; none for the CPU."""
    return [one.record(device) for one, device in _asynchronous(devices)]


def beside(devices: Iterable[torch.device]) -> list[AbstractContextManager[object]]:
    """Return contexts of side streams, see `Accelerator.beside`; none for the CPU."""
    return [one.beside(device) for one, device in _asynchronous(devices)]


def wait_done(events: Iterable[DeviceEvent], check: Callable[[], None] = lambda: None) -> None:
    """Wait until devices have reached events of `record`; RuntimeError if a device failed.

    `check` is called at each poll; it raises to give up, because they may never be reached.
    """
    for event in events:
        while not event.query():
            check()
            time.sleep(POLL_S)
