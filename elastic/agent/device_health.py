"""Detects GPUs that fail while the agent runs: lost from the bus, memory errors, fatal XID events.

Rule: queries use no GPU memory and no CUDA context. An XID that a faulty program causes (such as
an illegal address) is not a failure of the device.

Source: NVIDIA's "XID Errors" and the NVML reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

HARDWARE_XIDS = (48, 62, 64, 74, 79, 94, 95, 119, 120, 136, 140)
"""Double-bit errors, failed remapping, NVLink, off the bus, uncontained errors, a dead GSP."""
EVENTS_MAX = 64


class DeviceWatch:
    """Queries NVML; a GPU with a hardware XID counts as failed until the agent is restarted."""

    def __init__(self, nvml: Any, uuids: Sequence[str]) -> None:
        """Watch these devices; `nvml` is the module pynvml, initialised here and not shut down.

        Raises:
            nvml.NVMLError: there is no driver.
        """
        self._nvml = nvml
        nvml.nvmlInit()
        self._uuids = tuple(uuids)
        self._broken: dict[str, str] = {}
        self._events: Any = None
        with contextlib.suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
            for uuid in self._uuids:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                nvml.nvmlDeviceRegisterEvents(
                    handle, nvml.nvmlEventTypeXidCriticalError, self._events
                )

    def check(self) -> list[str]:
        """Return a phrase for each failed device."""
        self._take_events()
        found = []
        for index, uuid in enumerate(self._uuids):
            text = self._broken.get(uuid) or self._state(uuid)
            if text:
                found.append(f"GPU {index} ({uuid[:12]}) {text}")
        return found

    def _take_events(self) -> None:
        nvml = self._nvml
        for _ in range(EVENTS_MAX if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                number = int(event.eventData)
                uuid = nvml.nvmlDeviceGetUUID(event.device)
            except nvml.NVMLError:
                return
            name = uuid.decode() if isinstance(uuid, bytes) else uuid
            if number in HARDWARE_XIDS:
                self._broken.setdefault(name, f"reported XID {number}")

    def _state(self, uuid: str) -> str:
        """Return the present problem of a device, "" for none."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            return f"is lost: {error}"
        with contextlib.suppress(nvml.NVMLError):
            _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
            if has_failed:
                return "could not replace broken rows of its memory"
            if is_pending:
                return "waits for a reset to replace broken rows of its memory"
        return ""


def open_devices(entries: Sequence[str]) -> DeviceWatch | None:
    """Watch the GPUs that this node offers; None if there are none, or NVML is unavailable.

    Args:
        entries: of CUDA_VISIBLE_DEVICES. With a MIG entry all GPUs are watched, because the entry
            does not name its GPU.
    """
    if not entries:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    from elastic.agent.devices import is_named, read_nvml

    gpus = read_nvml()
    if isinstance(gpus, str):
        return None
    try:
        all_of_them = any(entry.startswith("MIG-") for entry in entries)
        offered = [
            gpu for gpu in gpus if all_of_them or any(is_named(gpu, entry) for entry in entries)
        ]
        return DeviceWatch(pynvml, [gpu.uuid for gpu in offered])
    except pynvml.NVMLError:
        return None
