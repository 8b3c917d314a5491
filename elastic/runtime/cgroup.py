"""What memory a container may use: the limit of its control group, of either version.

Rule: no limit, or none that can be read, is None; the numbers of the machine count then.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
VERSIONS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Limit and use, of version 2 and of version 1, which says "no limit" by one of 8 EiB."""


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the limit in bytes."""
    for limit, _ in VERSIONS:
        if (found := _number(root / limit)) is not None:
            return found
    return None


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes between the limit and what is used."""
    for limit, used in VERSIONS:
        has, uses = _number(root / limit), _number(root / used)
        if has is not None and uses is not None:
            return max(0, has - uses)
    return None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
