"""Connections of this process's groups that are not torch's: what they owe, and where they say so.

When a group is over, another thread cuts all of them, so that no wait in them lasts, and the main
thread closes them once it is out of them; a group in which no member has sent anything for long is
taken for stuck. Each registers when it is made.
"""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet


class OwnConnections(Protocol):
    """The connections of one group.

    Attributes:
        received_bytes: from all members so far; read by any thread.
    """

    received_bytes: int

    def cut(self) -> None:
        """End all of them, also those being made; any thread, again is no harm.

        A wait in them then raises GroupBroken within milliseconds, and so does what follows.
        """
        ...

    def close(self) -> None:
        """Free what they hold, exchanges in progress too; the thread that uses them, once cut."""
        ...


_all: WeakSet[OwnConnections] = WeakSet()
_lock = threading.Lock()


def register(connections: OwnConnections) -> None:
    """Have these cut and counted until nobody refers to them any more."""
    with _lock:
        _all.add(connections)


def cut_all() -> None:
    """Cut the connections of all groups of this process; any thread."""
    for one in _every():
        one.cut()


def close_all() -> None:
    """Close the connections of all groups of this process; for the thread that uses them."""
    for one in _every():
        one.close()


def received_bytes() -> int:
    """Return the bytes received over the connections of all groups of this process; any thread."""
    return sum(one.received_bytes for one in _every())


def _every() -> list[OwnConnections]:
    with _lock:
        return list(_all)
