"""What the machine has: memory, disks, limits of the kernel and of the shell.

Rule: a check reads, or writes one empty file and takes it away again; it changes nothing.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from elastic import __version__
from elastic.agent.doctor.check import Check, fail, ok, warn
from elastic.agent.health import MIB, memory_available, read_meminfo
from elastic.runtime import cgroup

GIB = 1024 * MIB
PYTHON_MIN = (3, 10)
SHM_BYTES_MIN = 1 * GIB
MEMORY_BYTES_MIN = 2 * GIB
DISK_BYTES_WARN, DISK_BYTES_FAIL = 2 * GIB, 256 * MIB
FILES_MIN, FILES_FAIL = 4096, 256
TASKS_MIN = 4096


def check_python() -> Check:
    """Look at the interpreter."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    found = f"Python {version}, elastic-torch {__version__}"
    if sys.version_info[:2] < PYTHON_MIN:
        return fail("python", found, "install Python 3.10 or newer")
    return ok("python", found)


def check_shm(path: Path = Path("/dev/shm")) -> Check:
    """Look at shared memory, which DataLoader workers hand batches over in."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return fail("shared memory", f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    found = f"{path}: {gib(usage.free)} of {gib(usage.total)} free"
    if usage.free < SHM_BYTES_MIN:
        return warn(
            "shared memory", found,
            "give the container more (docker --shm-size 8g; in Kubernetes an emptyDir in memory)",
        )  # fmt: skip
    return ok("shared memory", found)


def check_memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Path = cgroup.ROOT) -> Check:
    """Look at what memory is free, of the machine or of the container."""
    totals = (read_meminfo(meminfo).get("MemTotal"), cgroup.memory_limit(cgroups))
    available = memory_available(meminfo, cgroups)
    total = min((amount for amount in totals if amount is not None), default=None)
    if available is None or total is None:
        return warn("memory", f"{meminfo} does not say", "look at it by other means")
    found = f"{gib(available)} of {gib(total)} available"
    if available < MEMORY_BYTES_MIN:
        return warn("memory", found, "end what else runs: importing torch alone takes 0.3 GiB")
    return ok("memory", found)


def check_folder(name: str, folder: Path) -> Check:
    """Look whether a directory can be written to, and what its disk has left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        fix = f"make it writable for uid {os.getuid()}, or choose another"
        return fail(name, f"{folder}: {error.strerror or error}", fix)
    found = f"{folder}: {gib(free)} free"
    if free < DISK_BYTES_FAIL:
        return fail(name, found, "make room, or choose a directory on another disk")
    if free < DISK_BYTES_WARN:
        return warn(name, found, "make room: the output of workers goes there")
    return ok(name, found)


def check_files() -> Check:
    """Look at how many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"nofile {limit(soft)} (hard {limit(hard)})"
    fix = "raise it: ulimit -n 65536, LimitNOFILE= in systemd, or --ulimit nofile= in docker"
    if 0 <= soft < FILES_FAIL:
        return fail("open files", found, fix)
    if 0 <= soft < FILES_MIN:
        return warn("open files", found, fix)
    return ok("open files", found)


def check_locked(infiniband: Path = Path("/sys/class/infiniband")) -> Check:
    """Look at how much memory may be locked, which RDMA needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"memlock {limit(soft, MIB, ' MiB')}"
    has_rdma = infiniband.is_dir() and any(infiniband.iterdir())
    if has_rdma and soft != resource.RLIM_INFINITY:
        return warn(
            "locked memory", f"{found}, and there is InfiniBand",
            "ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1",
        )  # fmt: skip
    return ok("locked memory", found)


def check_tasks(
    pid_max: Path = Path("/proc/sys/kernel/pid_max"),
    cgroup: Path = Path("/sys/fs/cgroup/pids.max"),
) -> Check:
    """Look at how many processes and threads there may be."""
    limits = {"pid_max": number(pid_max), "pids.max of the cgroup": number(cgroup)}
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits["nproc"] = soft if soft >= 0 else None
    known = {name: value for name, value in limits.items() if value is not None}
    found = ", ".join(f"{name} {value}" for name, value in known.items()) or "no limit"
    low = [name for name, value in known.items() if value < TASKS_MIN]
    if low:
        fix = f"raise {' and '.join(low)}: every worker has tens of threads"
        return warn("processes", found, fix)
    return ok("processes", found)


def number(path: Path) -> int | None:
    """Return the number in a file, None where there is none ("max", or no such file)."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def limit(value: int, unit: int = 1, name: str = "") -> str:
    """Return a limit for people."""
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit}{name}"


def gib(amount: int) -> str:
    """Return bytes for people."""
    return f"{amount / GIB:.1f} GiB"
