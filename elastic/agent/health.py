"""What is wrong with this machine: full disks, no memory, broken devices; polled now and then.

Rule: polling never disturbs training: it reads counters, in a thread, a few times a minute.
Problems are reported as they are now, also when they end, with a margin, so that a value that
swings about its limit is not reported each time.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from elastic.agent.device_health import DeviceWatch
from elastic.runtime import cgroup
from elastic.runtime.snapshot_memory import available_memory

log = logging.getLogger(__name__)

POLL_S = 15.0
MIB = 1024 * 1024
DISK_BYTES_MIN = 256 * MIB
MEMORY_BYTES_MIN = 256 * MIB
MARGIN = 2
"""A problem ends once twice the minimum is free (hysteresis)."""


class HealthWatch:
    """Checks one machine; keeps the previous result, for the margin."""

    def __init__(
        self,
        folders: Sequence[Path],
        devices: DeviceWatch | None = None,
        *,
        free_bytes: Callable[[Path], int] | None = None,
        meminfo: Path = Path("/proc/meminfo"),
        cgroups: Path = cgroup.ROOT,
    ) -> None:
        """Start without problems.

        Args:
            folders: directories that the agent and its workers write to.
            devices: the accelerators, None for none.
            free_bytes: returns the free bytes of a folder's disk; `shutil.disk_usage` by default.
            meminfo: path of /proc/meminfo.
            cgroups: root of the cgroup file system, which holds a container's limits.
        """
        self._folders = tuple(dict.fromkeys(folders))
        self._devices = devices
        self._free_bytes = free_bytes or (lambda path: shutil.disk_usage(path).free)
        self._meminfo, self._cgroups = meminfo, cgroups
        self._low: set[str] = set()

    def check(self) -> tuple[str, ...]:
        """Check the machine; return a phrase for each problem, in a fixed order."""
        found = []
        for folder in self._folders:
            text = self._disk(folder)
            if text:
                found.append(text)
        available = available_memory(self._meminfo, self._cgroups)
        if available is not None and self._is_low("memory", available, MEMORY_BYTES_MIN):
            found.append("almost no memory is free")
        if self._devices is not None:
            found += self._devices.check()
        return tuple(found)

    def _disk(self, folder: Path) -> str:
        try:
            free = self._free_bytes(_existing(folder))
        except OSError as error:
            return f"the disk of {folder} cannot be read ({error.strerror or error})"
        if self._is_low(str(folder), free, DISK_BYTES_MIN):
            return f"the disk of {folder} is full"
        return ""

    def _is_low(self, what: str, amount: int, least: int) -> bool:
        limit = least * MARGIN if what in self._low else least
        if amount < limit:
            self._low.add(what)
        else:
            self._low.discard(what)
        return what in self._low


async def watch_health(watch: HealthWatch, on_change: Callable[[tuple[str, ...]], None]) -> None:
    """Check every `POLL_S` until cancelled; call `on_change` when the list of problems changes."""
    before: tuple[str, ...] = ()
    while True:
        try:
            found = await anyio.to_thread.run_sync(watch.check, abandon_on_cancel=True)
        except Exception:
            # NVML and file systems may raise anything; the agent keeps the previous result.
            log.exception("health_unknown")
            found = before
        if found != before:
            before = found
            on_change(found)
        await anyio.sleep(POLL_S)


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
