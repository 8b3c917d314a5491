"""Memory and processor limits of this process, by its control groups (cgroup v1 and v2).

Rule: the tightest limit counts, of the process's group (a SLURM step, a systemd unit) and of all
visible parents; a container sees its own group as the root. No limit, or none that can be read, is
None; the machine's own numbers apply then.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMORY = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)
"""Names of limit, usage, and page cache, which the kernel can reclaim: first of version 2, then of
version 1, where "no limit" reads as 8 EiB."""
CPU = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the limit in bytes, None for none."""
    limits = (_number(group / limit) for group in _groups(root, "memory") for limit, *_ in MEMORY)
    return min((limit for limit in limits if limit is not None), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return the limit minus the usage without page cache, in bytes; None without a limit."""
    left = []
    for group in _groups(root, "memory"):
        for limit, used, droppable in MEMORY:
            has, uses = _number(group / limit), _number(group / used)
            if has is not None and uses is not None:
                uses -= sum(_entry(group / "memory.stat", name) for name in droppable)
                left.append(max(0, has - max(0, uses)))
    return min(left, default=None)


def cpu_limit(root: Path = ROOT) -> float | None:
    """Return the limit in processors (quota / period), None for none."""
    limits = []
    for group in _groups(root, "cpu"):
        for files in CPU:
            try:
                words = " ".join((group / file).read_text() for file in files).split()
                quota, period = (int(word) for word in words)  # "max" and -1 are no limit.
            except (OSError, ValueError):
                continue
            if quota > 0 and period > 0:
                limits.append(quota / period)
    return min(limits, default=None)


def _groups(root: Path, controller: str) -> Iterable[Path]:
    """Return the folders of this process's groups and all their parents, each once."""
    found: list[Path] = []
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", f"1:{controller}:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # In version 1 each controller has its own tree, named after it.
        top = root / controller if controllers else root
        below = [part for part in path.split("/") if part not in ("", ".", "..")]
        found += (top.joinpath(*below[:depth]) for depth in range(len(below), -1, -1))
    return dict.fromkeys(found)


def _entry(file: Path, name: str) -> int:
    """Return one number of a file of "name number" lines, 0 if it is missing."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.split()[:1] == [name]]
    return int(found[0]) if found and found[0].isdigit() else 0


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
